"""The commands that begin with %, of the prompt `branching session` and of the Jupyter kernel."""

from __future__ import annotations

from collections.abc import Callable

from branching.cli.output import change_lines
from branching.fs import Change
from branching.session import Child, Session


class CommandError(Exception):
    """A command makes no sense. Nothing was done."""


class SessionCommands:
    """A session, and the child in which code runs now. Each command returns what it says."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.child: Child | None = None
        """None: code runs in the session."""
        self.table: dict[str, Callable[[str], str]] = {
            "fork": self._fork,
            "child": self._select,
            "children": self._list_children,
            "pick": self._pick,
            "back": self._back,
            "diff": self._diff,
            "commit": self._commit,
        }

    @property
    def place(self) -> Session | Child:
        """Where code runs."""
        return self.child or self.session

    @property
    def children(self) -> list[Child]:
        """The children, of which there is at least one. Raises CommandError if there is none."""
        if not self.session.is_forked:
            raise CommandError("there are no children; %fork N makes some")
        return self.session.children

    def _fork(self, argument: str) -> str:
        children = self.session.fork(_number(argument, "%fork 3"))
        self.child = children[0]
        return f"{len(children)} children; code runs in child 0 now"

    def _select(self, argument: str) -> str:
        self.child = self.named(argument)
        return ""

    def _list_children(self, _: str) -> str:
        lines = []
        for child in self.children:
            mark = "*" if child is self.child else " "
            state = f"{len(child.diff())} changed paths" if child.is_alive else "has ended"
            lines.append(f"{mark} {child.index}  {child.branch.name}  {state}")
        return "\n".join(lines)

    def _pick(self, argument: str) -> str:
        child = self.named(argument)
        changes = self.session.pick(child)
        self.child = None
        return f"child {child.index} is the session now\n{_described(changes)}"

    def _back(self, _: str) -> str:
        self.session.none()
        self.child = None
        return ""

    def _diff(self, _: str) -> str:
        return _described(self.place.diff())

    def _commit(self, _: str) -> str:
        return _described(self.session.commit())

    def named(self, argument: str) -> Child:
        """Returns the child with a number; without one, the child in which code runs."""
        children = self.children
        if not argument and self.child is not None:
            return self.child
        number = _number(argument, "%child 1")
        if number >= len(children):
            raise CommandError(f"there are children 0 to {len(children) - 1}")
        return children[number]


def leave(live: Session) -> str | None:
    """Ends a session. Its branch stays open if it has changes: returns its name then."""
    branch = live.keep()
    if not branch.diff():
        branch.abort()
        return None
    return branch.name


def _described(changes: list[Change]) -> str:
    return "\n".join(change_lines(changes)) or "no changed files"


def _number(argument: str, example: str) -> int:
    if not argument.isdecimal():
        raise CommandError(f"a number is missing: {example}")
    return int(argument)
