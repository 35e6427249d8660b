"""A session: a Python interpreter in a branch, which forks with its memory and its files.

    with Session(directory) as session:
        session.run("data = load()")
        children = session.fork(3)
        for child, text in zip(children, attempts):
            child.run(text)
        session.pick(children[1])

States of a session:

    idle ── fork() ──> forked ── pick(), none() ──> idle
      └── commit() ──> idle        abort(), end of the `with` ──> closed

While it is forked its branch is frozen, and its interpreter waits. The session's branch is a child
of the workspace, the branches of children are children of it: `pick` commits one into it, and
`commit` commits it into the workspace.
"""

from __future__ import annotations

import os
import secrets
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType

from branching._standard_streams import open_closed
from branching._threads import run_in_thread
from branching.errors import BranchingError, MemoryBranchError, add_note
from branching.fs import Branch, Change, Workspace
from branching.process import ResourceLimits
from branching.process.sandbox.config import validate_isolation
from branching.process.sandboxed_process import SandboxedProcess
from branching.session import other_python
from branching.session.branch_mounts import BranchMounts
from branching.session.child import Child
from branching.session.code_runner import CodeRunner, check_state, close_dead, not_busy, unpark
from branching.session.interpreter import Ends, Interpreter, OutputFunction
from branching.session.launch import launch

CHILDREN_MAX = 64
"""Of one fork: their descriptors are sent in one message."""


class Session(CodeRunner):
    """A Python interpreter that runs in a branch of a workspace, and forks with its memory.

    The interpreter runs in a sandbox, like any candidate. Leaving the `with` commits the session's
    files to the workspace on a clean exit, and drops them after an exception.

    Args:
        workspace: A Workspace, a Branch, or a directory, which is opened as a workspace.
        python: Another interpreter than the caller's: a path, or a name on PATH. It needs Python
            3.10 or later, and no package: `branching` is lent to it. Only an interpreter of the
            caller's version can run functions.
        limits: Resource limits of the session together with all its children. `wall_time` counts
            from the start.
        hide: Glob patterns of files in the workspace that the session and its children cannot
            read: `**/.env`.
        network: False leaves only the loopback interface.
        env: Variables to add to the environment.
        clean_env: Start with an almost empty environment.
        stdout: A function that is called with what the interpreter, or a child, prints while it
            runs code. `Cell.stdout` has it too.
        stderr: The same for standard error.

    Raises:
        FileNotFoundError: There is no such interpreter.
        TypeError: An argument has the wrong type.
        ValueError: A glob is invalid.
    """

    def __init__(
        self,
        workspace: Workspace | Branch | str | os.PathLike[str],
        *,
        python: str | os.PathLike[str] | None = None,
        limits: ResourceLimits | None = None,
        hide: Sequence[str] = (),
        network: bool = True,
        env: Mapping[str, str] | None = None,
        clean_env: bool = False,
        stdout: OutputFunction | None = None,
        stderr: OutputFunction | None = None,
    ) -> None:
        if limits is not None and not isinstance(limits, ResourceLimits):
            raise TypeError(f"limits must be ResourceLimits, not {limits!r}")
        self._given = workspace
        self._python = None if python is None else other_python.find(python)
        self._limits = limits
        validate_isolation("sandbox", network=network, hide=hide)
        self._hide = tuple(hide)
        self._network = network
        self._env = dict(env or {})
        self._clean_env = clean_env
        self._sinks = (stdout, stderr)
        self._name = f"session-{secrets.token_hex(4)}"
        self._generation = 0
        self._lock = threading.Lock()  # guards all below
        self._was_started = False
        self._stack = ExitStack()
        self._source: Workspace | Branch
        self._branch: Branch | None = None
        self._process: SandboxedProcess | None = None
        self._interpreter: Interpreter | None = None
        self._mounts: BranchMounts
        self._children: list[Child] = []
        self._dying: list[tuple[Interpreter, Branch | None]] = []
        """Killed interpreters, each with its branch if that is to be dropped."""

    @property
    def pid(self) -> int:
        """Process id of the interpreter, as seen from this program. `pick` changes it."""
        return self._running().pid

    @property
    def branch(self) -> Branch:
        """The branch that has the session's files. `commit` replaces it by a new one.

        Raises:
            MemoryBranchError: The session was not started.
        """
        if self._branch is None:
            raise MemoryBranchError("the session was not started", hint="use it in a `with`")
        return self._branch

    @property
    def children(self) -> list[Child]:
        """The children of the last fork; empty if there was none, or it was decided."""
        return list(self._children)

    @property
    def is_forked(self) -> bool:
        """Whether there are children among which to `pick`."""
        return bool(self._children)

    def _check_can_run(self) -> None:
        if self._children:
            raise MemoryBranchError(
                "the session has forked, and waits: the code did not run",
                hint="run it in a child, or decide with pick() or none() first",
            )

    def fork(self, n: int, *, allow_threads: bool = False) -> list[Child]:
        """Forks the interpreter into `n` children, each in a branch of the session's branch.

        Each child has the variables of the session, its open files and its working directory; the
        files of the workspace are open in the branch of the child. The session waits until `pick`
        or `none`.

        Args:
            n: The number of children, at most CHILDREN_MAX.
            allow_threads: Fork although other threads run. They do not run in the children.

        Returns:
            The children.

        Raises:
            MemoryBranchError: Something cannot be forked; the message names it. Nothing was
                changed, and the session can be used.
            ValueError: `n` is out of range.
        """
        if not 1 <= n <= CHILDREN_MAX:
            raise ValueError(f"n must be from 1 to {CHILDREN_MAX}, not {n!r}")
        with self._lock:
            interpreter = self._idle("fork")
            self._bury()
            with interpreter.busy:
                what = "the session did not fork"
                for shared in check_state(interpreter, what, allow_threads=allow_threads):
                    warnings.warn(shared, stacklevel=3)
                interpreter.ask(b"park fork")
                self._generation += 1
                try:
                    self._children = self._forked(interpreter, n)
                except BaseException as error:
                    try:
                        interpreter.ask(b"unpark")
                    except BranchingError as failure:
                        add_note(error, f"and the session cannot be used any more: {failure}")
                    raise
            return self.children

    async def fork_async(self, n: int, *, allow_threads: bool = False) -> list[Child]:
        """Does the same as `fork` without blocking the event loop.

        Args:
            n: The number of children.
            allow_threads: Fork although other threads run.

        Returns:
            The children.
        """
        return await run_in_thread(lambda: self.fork(n, allow_threads=allow_threads))

    def pick(self, child: Child) -> list[Change]:
        """Makes a child the session: its variables, its open files, and its files.

        The child's branch is committed into the session's. Then the other children and the earlier
        interpreter are killed, with all that they have started. They run nothing any more when this
        returns; the kernel may still be freeing their memory.

        Args:
            child: A child of the last fork.

        Returns:
            The changes to the files of the session.

        Raises:
            MemoryBranchError: The child cannot be picked; the message says why. Session and
                children are as before.
            CommitError: The file system refused the commit. Session and children are as before.
        """
        with self._lock:
            if child not in self._children:
                raise MemoryBranchError(
                    f"{child!r} is not a child of this session that can be picked",
                    hint="pick one of session.children",
                )
            self._bury()
            winner = child._interpreter
            with not_busy(winner, "picked"):
                changes = self._committed(winner, child._branch.commit)
                self._replace_by(child)
            return changes

    async def pick_async(self, child: Child) -> list[Change]:
        """Does the same as `pick` without blocking the event loop.

        Args:
            child: A child of the last fork.

        Returns:
            The changes to the files of the session.
        """
        return await run_in_thread(lambda: self.pick(child))

    def none(self) -> None:
        """Drops all children and their files. The session goes on as it was before the fork.

        Raises:
            MemoryBranchError: There are no children, or the session's interpreter has ended.
        """
        with self._lock:
            if not self._children:
                raise MemoryBranchError("there are no children: the session has not forked")
            self._drop_children()
            interpreter = self._running()
            with interpreter.busy:
                unpark(interpreter)

    async def none_async(self) -> None:
        """Does the same as `none` without blocking the event loop."""
        await run_in_thread(self.none)

    def commit(
        self, *, force: bool = False, only: Sequence[str] = (), exclude: Sequence[str] = ()
    ) -> list[Change]:
        """Commits the session's files to the workspace. The session goes on in a new branch.

        What Python's file objects have buffered is written first.

        Args:
            force: Commit the session's version of paths that were changed elsewhere.
            only: Glob patterns of the paths to commit.
            exclude: Glob patterns of paths to leave out. The session keeps their changes.

        Returns:
            The changes to the workspace.

        Raises:
            ConflictError: The same paths were changed elsewhere. Nothing was changed, and the
                session can be used.
            CommitError: The file system refused the commit. The same holds.
            MemoryBranchError: There are children, or something cannot be carried over to a new
                branch; the message names it. The same holds.
        """
        with self._lock:
            interpreter = self._idle("commit")
            self._bury()
            branch = self.branch
            with not_busy(interpreter, "committed"):
                changes = self._committed(
                    interpreter,
                    lambda: branch.commit(force=force, only=only, exclude=exclude),
                    flushes=True,
                )
                if not branch.is_open:
                    self._branch = self._new_branch()
                self._mounts.attach(interpreter, self.branch)
                unpark(interpreter)
            return changes

    async def commit_async(
        self, *, force: bool = False, only: Sequence[str] = (), exclude: Sequence[str] = ()
    ) -> list[Change]:
        """Does the same as `commit` without blocking the event loop.

        Args:
            force: Commit the session's version of paths that were changed elsewhere.
            only: Glob patterns of the paths to commit.
            exclude: Glob patterns of paths to leave out.

        Returns:
            The changes to the workspace.
        """
        return await run_in_thread(lambda: self.commit(force=force, only=only, exclude=exclude))

    def abort(self) -> None:
        """Ends the session, and drops its files and those of its children.

        Does nothing if the session has ended.
        """
        self._end_process("the session was aborted")
        with self._lock:
            branch = self._branch
            self._branch = None
            if branch is not None and branch.is_open:
                branch.abort()

    async def abort_async(self) -> None:
        """Does the same as `abort` without blocking the event loop."""
        await run_in_thread(self.abort)

    def keep(self) -> Branch:
        """Ends the session, and leaves its branch open with its files. Children are dropped.

        What Python's file objects have buffered is written first. Code that still runs is killed.

        Returns:
            The branch. It stays open until its `commit` or `abort`.

        Raises:
            MemoryBranchError: The session does not run.
        """
        self._running()
        branch = self._finish()
        branch.release()
        return branch

    def diff(self) -> list[Change]:
        """Returns the differences between the session's files and those of the workspace."""
        return self.branch.diff()

    def __enter__(self) -> Session:
        with self._lock:
            if self._was_started:
                raise MemoryBranchError(
                    "the session was started before: a Session object serves one `with`"
                )
            self._was_started = True
            with ExitStack() as stack:
                stack.callback(self._close)
                self._start(stack)
                self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._stack:
            if kind is None:
                if self._interpreter is not None:  # not aborted
                    self._finish().__exit__(None, None, None)
                return
            try:
                self.abort()
            except BranchingError as failure:
                add_note(error, f"and the session's branch stays open: {failure}")

    async def __aenter__(self) -> Session:
        try:
            return await run_in_thread(self.__enter__)
        except BaseException:
            if self._process is not None:  # started before the thread noticed the cancellation
                await run_in_thread(lambda: self.__exit__(RuntimeError, None, None))
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await run_in_thread(lambda: self.__exit__(kind, error, traceback))

    def _start(self, stack: ExitStack) -> None:
        open_closed()
        given = self._given
        if isinstance(given, (Workspace, Branch)):
            self._source = given
        else:
            opened = Workspace.open(given)
            stack.callback(opened.close)
            self._source = opened
        self._source.check_call(is_nested=True)
        self._branch = self._new_branch()
        try:
            started = launch(
                stack,
                self._branch,
                python=self._python,
                limits=self._limits,
                hide=self._hide,
                network=self._network,
                environment=self._env,
                clean_env=self._clean_env,
                sinks=self._sinks,
            )
            self._process, self._interpreter = started.process, started.interpreter
            self._mounts = started.mounts
            self._interpreter.await_here()
            self._mounts.adopt(self._interpreter)
        except BaseException:
            self._close()
            self._branch.abort()
            self._branch = None
            raise

    def _new_branch(self) -> Branch:
        name = f"{self._name}-{self._generation}" if self._generation else self._name
        self._generation += 1
        return self._source.branch(name).__enter__()

    def _forked(self, interpreter: Interpreter, n: int) -> list[Child]:
        children: list[Child] = []
        all_ends: list[Ends] = []
        try:
            for index in range(n):
                branch = self.branch.branch(f"{self._name}-{self._generation}-{index + 1}")
                branch.__enter__()
                ends = Ends()
                all_ends.append(ends)
                copy = Interpreter(ends, f"child {index}", self._sinks)
                children.append(Child(index, branch, copy))
            interpreter.ask(b"fork", [number for ends in all_ends for number in ends.its()])
            for ends in all_ends:
                ends.close_its()
            all_ends.clear()
            for child in children:
                child._interpreter.await_here()
                self._mounts.detach(child._interpreter, interpreter.mount)
                self._mounts.attach(child._interpreter, child._branch)
            for child in children:
                unpark(child._interpreter)
        except BaseException:
            for ends in all_ends:
                ends.close_its()
            self._drop(children, "the fork failed")
            raise
        return children

    def _committed(
        self,
        interpreter: Interpreter,
        commit: Callable[[], list[Change]],
        *,
        flushes: bool = False,
    ) -> list[Change]:
        """Commits the branch of an interpreter, which is parked then and sees no branch.

        If the commit is refused, the interpreter goes on in its branch.
        """
        branch = self._branch_of(interpreter)
        check_state(interpreter, "nothing was committed", allow_threads=True)
        interpreter.ask(b"park commit" if flushes else b"park pick")
        try:
            self._mounts.detach(interpreter, interpreter.mount)
            try:
                return commit()
            except BaseException:
                self._mounts.attach(interpreter, branch)
                raise
        except BaseException as error:
            try:
                unpark(interpreter)
            except BranchingError as failure:
                add_note(error, f"and {interpreter.name} cannot be used any more: {failure}")
            raise

    def _branch_of(self, interpreter: Interpreter) -> Branch:
        for child in self._children:
            if child._interpreter is interpreter:
                return child._branch
        return self.branch

    def _replace_by(self, child: Child) -> None:
        """Makes a child whose branch was committed the session's interpreter."""
        winner = child._interpreter
        earlier = self._running()
        reason = f"child {child.index} was picked"
        losers = [other for other in self._children if other is not child]
        for interpreter in (earlier, *(other._interpreter for other in losers)):
            interpreter.kill(reason)
        self._children = []
        self._interpreter = winner
        winner.name = "the interpreter of the session"
        self._dying = [(earlier, None), *((other._interpreter, other._branch) for other in losers)]
        for interpreter, branch in self._dying:
            self._mounts.kill(interpreter.mount)  # with all that it has started
            if branch is not None:
                with suppress(BranchingError):  # tried again by `_bury`
                    branch.abort()  # the session's branch is frozen while it has other branches
        self._mounts.attach(winner, self.branch)
        unpark(winner)

    def _bury(self) -> None:
        """Waits for the end of killed interpreters, and drops their branches.

        `pick` does not wait for it: they run nothing any more, but the kernel may need hundreds of
        milliseconds to free their memory. The next change of the session does.
        """
        dying, self._dying = self._dying, []
        failure: BranchingError | None = None
        for interpreter, branch in dying:
            try:
                if branch is None:  # it saw what the session sees now: others may live
                    interpreter.await_end()
                elif interpreter.mount:
                    self._mounts.bury(interpreter.mount)
            except MemoryBranchError as error:
                failure = failure or error
            close_dead(interpreter)
            try:
                if branch is not None and branch.is_open:
                    branch.abort()
            except BranchingError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _drop_children(self) -> None:
        children, self._children = self._children, []
        self._drop(children, "none of the children was picked")

    def _drop(self, children: Sequence[Child], reason: str) -> None:
        """Kills children with all that they have started, and drops their branches."""
        for child in children:
            child._interpreter.kill(reason)
        self._dying += [(child._interpreter, child._branch) for child in children]
        self._bury()

    def _idle(self, what: str) -> Interpreter:
        if self._children:
            raise MemoryBranchError(
                f"the session has forked, and cannot {what}: nothing was changed",
                hint="decide with pick() or none() first",
            )
        return self._running()

    def _running(self) -> Interpreter:
        if self._interpreter is None:
            raise MemoryBranchError(
                "the session does not run: it was not started, or has ended",
                hint="use it in a `with`",
            )
        return self._interpreter

    def _finish(self) -> Branch:
        """Ends the session after a clean exit; returns its branch, which is still open."""
        interpreter = self._running()
        branch = self.branch
        with self._lock:
            if self._children:
                self._drop_children()
                unpark(interpreter)
            self._bury()
        if interpreter.busy.acquire(blocking=False):
            try:
                interpreter.ask(b"end")
            except MemoryBranchError:
                pass  # a killed interpreter has nothing to flush
            finally:
                interpreter.busy.release()
        self._end_process("the session has ended")
        self._branch = None
        return branch

    def _end_process(self, reason: str) -> None:
        """Kills everything in the sandbox."""
        if self._interpreter is not None:
            self._interpreter.end_reason = reason
        for child in self._children:
            child._interpreter.end_reason = reason
        if self._process is not None and not self._process.has_ended():
            self._process.kill()
        with self._lock:
            self._close()

    def _close(self) -> None:
        """Ends the sandbox and closes all descriptors. The branches stay."""
        process, self._process = self._process, None
        if process is not None:
            process.finish()
        dying, self._dying = self._dying, []
        for interpreter in (
            *(child._interpreter for child in self._children),
            *(d for d, _ in dying),
        ):
            close_dead(interpreter)
        for _, branch in dying:
            if branch is not None and branch.is_open:
                branch.abort()
        self._children = []
        if self._interpreter is not None:
            close_dead(self._interpreter)
            self._interpreter = None
