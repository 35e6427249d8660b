"""The Python session of a server: one interpreter at a time, which forks with its memory.

Its branch is in use as long as it runs, as that of a command in the background: it cannot be
committed meanwhile, and aborting it ends the interpreter first. After its end the branch is like
any other that was made through the server.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from branching._cancellation import CancelScope
from branching.errors import BranchError, BranchingError, MemoryBranchError
from branching.fs import Branch, Change
from branching.mcp.worker_threads import run_long, run_short, start_thread
from branching.mcp.workspace_session import WorkspaceSession
from branching.session import Cell, Child, Session


class PythonSession:
    """A running interpreter, with its children."""

    def __init__(self, session: WorkspaceSession) -> None:
        rules = session.rules
        self._workspace_session = session
        self._live = Session(
            session.workspace,
            limits=rules.limits,
            hide=rules.hide,
            network=rules.network,
            clean_env=rules.clean_env,
            env={name: os.environ[name] for name in rules.env if name in os.environ},
        )
        self._scope = CancelScope()
        self._ended: Callable[[], None] = lambda: None

    @property
    def branch(self) -> Branch:
        """The branch that has the session's files."""
        return self._live.branch

    @property
    def children(self) -> list[Child]:
        """The children of the last fork."""
        return self._live.children

    async def start(self) -> None:
        """Starts the interpreter."""
        await run_short(self._live.__enter__)
        self._ended = self._workspace_session.begin(self.branch.name, self._scope)
        self._scope.on_cancel(self._stop)

    async def run(self, code: str, child: int | None, seconds: float) -> Cell:
        """Runs code in the session, or in a child."""
        place = self._live if child is None else self.child(child)
        if child is None and self.children:
            raise BranchError(
                "the code did not run: the session has forked, and waits",
                hint=f"name a child (0 to {len(self.children) - 1}), or decide with session_pick",
            )
        scope = CancelScope()
        scope.on_cancel(lambda _: place.interrupt())
        call = partial(place.run, code, timeout=seconds)
        try:
            return await run_long(call, name="session", scope=scope)
        except TimeoutError as error:
            raise MemoryBranchError(
                f"{error}. Its effects until then remain",
                hint="continue with session_run, with a longer timeout_seconds if needed",
            ) from None

    async def fork(self, n: int) -> None:
        """Forks the interpreter."""
        await run_short(partial(self._live.fork, n))

    async def pick(self, child: int | None) -> list[Change]:
        """Makes a child the session; None drops all children."""
        if child is None:
            await run_short(self._live.none)
            return []
        return await run_short(partial(self._live.pick, self.child(child)))

    async def end(self) -> Branch:
        """Ends the interpreter, and leaves its branch open."""
        branch = await run_short(self._keep)
        self._settle()
        return branch

    def child(self, index: int) -> Child:
        """Returns a child by its number. BranchError if there is none."""
        if not 0 <= index < len(self.children):
            known = f"0 to {len(self.children) - 1}" if self.children else "none: session_fork"
            raise BranchError(
                f"the session has no child {index}. Nothing was changed",
                hint=f"the children are {known}",
            )
        return self.children[index]

    def _keep(self) -> Branch:
        branch = self._live.keep()
        self._workspace_session.own(branch)
        self._live.__exit__(None, None, None)
        return branch

    def _stop(self, _: float) -> None:
        """Ends the interpreter for what aborts its branch, or ends the server."""

        def work() -> None:
            try:
                self._keep()
            except BranchingError:
                pass  # it has ended

        start_thread(work, name="end of the session", on_end=self._settle, is_daemon=False)

    def _settle(self) -> None:
        if self._workspace_session.python is self:
            self._workspace_session.python = None
        self._ended()


async def started(session: WorkspaceSession) -> PythonSession:
    """Returns the session of the server; starts one if there is none."""
    async with session.python_start:
        if session.python is None:
            made = PythonSession(session)
            await made.start()
            session.python = made
        return session.python


def running(session: WorkspaceSession) -> PythonSession:
    """Returns the session of the server. MemoryBranchError if there is none."""
    if session.python is None:
        raise MemoryBranchError(
            "there is no session. Nothing was done", hint="session_run starts one"
        )
    return session.python
