"""A child of a session."""

from __future__ import annotations

from branching.fs import Branch, Change
from branching.session.code_runner import CodeRunner
from branching.session.interpreter import Interpreter


class Child(CodeRunner):
    """A child of a session: a copy of its interpreter, in a branch of its own.

    Objects of this class come from `Session.fork`. Different children can run code at the same
    time, in different threads.
    """

    def __init__(self, index: int, branch: Branch, interpreter: Interpreter):
        self._branch = branch
        self._interpreter = interpreter
        self.index = index
        """Its place among the children of the fork, from 0."""

    @property
    def pid(self) -> int:
        """Process id of the interpreter, as seen from this program."""
        return self._interpreter.pid

    @property
    def branch(self) -> Branch:
        """The branch of the child. `Session.pick` commits it."""
        return self._branch

    @property
    def is_alive(self) -> bool:
        """Whether the interpreter is still running."""
        return self._interpreter.process >= 0 and not self._interpreter.has_ended()

    def _running(self) -> Interpreter:
        return self._interpreter

    def diff(self) -> list[Change]:
        """Returns the differences between the child's files and those of the session."""
        return self._branch.diff()

    def __repr__(self) -> str:
        return f"<Child {self.index} {self._branch.branch_path}>"
