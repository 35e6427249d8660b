"""The state of one server: a workspace, the rules, and the branches created through the server.

The session does not depend on the protocol. Its methods are called in the event loop's thread only.
Blocking calls run in other threads and are awaited (`worker_threads`).

When the server ends, it aborts the branches that were created through it and are still open, unless
they were kept or the user commits them (`Rules.propose`). A branch cannot be committed while a
command runs in it. Aborting a branch ends its commands first.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import anyio

from branching._cancellation import STOP_GRACE_SECONDS, CancelScope
from branching.errors import (
    BranchError,
    BranchingError,
    BranchNotFoundError,
    add_note,
)
from branching.fs import Branch, BranchRecord, Change, Reversal, Workspace
from branching.fs.branch_leases import BranchLeases, drop_orphaned
from branching.fs.confined_dir import ConfinedDir
from branching.mcp.worker_threads import run_short
from branching.process import Owner, ResourceLimits
from branching.process.sandbox.masked_files import Finder

if TYPE_CHECKING:
    from branching.mcp.background import Started
    from branching.mcp.python_session import PythonSession

_log = logging.getLogger("branching.mcp")
MAIN = "main"
"""The name of the workspace itself where a branch name is expected."""
STORE_NAME = ".branching"
"""The name in a workspace's root that no branch shows."""
SECONDS_MAX_DEFAULT = 3600.0
FINDERS_MAX = 16
"""Number of branches whose hidden files are cached, at some hundred bytes for each directory."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Rules for all commands that run through the server."""

    limits: ResourceLimits | None = None
    """Limits of each command, and of each candidate of a race."""
    hide: tuple[str, ...] = ()
    """Globs of files that neither commands nor the file tools can read or write."""
    network: bool = False
    clean_env: bool = True
    """Commands get an environment without keys and tokens."""
    env: tuple[str, ...] = ()
    """Names of variables that commands get nevertheless."""
    propose: bool = False
    """The agent cannot commit. Its branches stay when the server ends, for the user to commit."""
    seconds_max: float = SECONDS_MAX_DEFAULT
    """The longest time for one command or race."""
    seen_as: tuple[Path, ...] = ()
    """Other names of the workspace's directory: in a container, its path on the host."""


class WorkspaceSession:
    """The state of one server. At its end it ends all commands and aborts its branches."""

    def __init__(
        self, workspace: Workspace, owner: Owner | None = None, rules: Rules | None = None
    ) -> None:
        workspace.check_call(is_compared=True)
        self.workspace = workspace
        self.owner = owner
        self.rules = rules or Rules()
        self._finders: dict[str, Finder] = {}
        """Finders of hidden files, by the directory of a branch."""
        self._made: dict[int, str] = {}
        self._racing: dict[int, BranchRecord] = {}
        """Branches of running races, which end with their race."""
        self._leases = BranchLeases(workspace)
        """Leases of these branches. The next server aborts them if this one is killed."""
        self._running: dict[str, set[_Run]] = {}
        self.background: dict[str, Started] = {}
        """Background commands by id: all that run, and the last ones that have ended."""
        self.python: PythonSession | None = None
        """The Python session, while it runs."""
        self.python_start = anyio.Lock()
        """Held while it is started."""

    @property
    def directories(self) -> list[Path]:
        """All paths of the workspace's directory."""
        space = self.workspace
        return [space.seen_at, space.base, *self.rules.seen_as]

    # Branches.

    async def branches(self) -> list[BranchRecord]:
        """Returns the open branches, the oldest first."""
        return await run_short(self.workspace.branches)

    async def find(self, name: str) -> Branch:
        """Returns an open branch. Raises BranchNotFoundError if there is none with this name."""
        if name == MAIN:
            raise BranchError(
                f"{MAIN!r} is the workspace itself, which changes by commits alone. Nothing was "
                "done",
                hint="branch_create makes a branch to work in",
            )
        return await run_short(lambda: self.workspace.reopen(name))

    async def create(self, name: str | None, parent: str) -> Branch:
        """Creates a branch of the workspace or of another branch. It belongs to the session."""
        limits = self.rules.limits
        origin = self.workspace if parent == MAIN else await self.find(parent)
        branch = origin.branch(
            name or f"mcp-{secrets.token_hex(4)}",
            on_success=None,
            disk_limit=None if limits is None else limits.disk,
        )
        # Runs to its end even if the request is cancelled, so that the branch is registered.
        await run_short(lambda: self.own(branch.__enter__()))
        return branch

    def own(self, branch: Branch) -> None:
        """Registers an open branch: it is aborted when the server ends. Blocks."""
        record = branch.inspect()
        self._made[record.id] = branch.name
        if not self.rules.propose:
            self._claim(record)

    def _claim(self, record: BranchRecord) -> None:
        try:
            self._leases.add(record)
        except OSError as error:
            _log.warning("branch %s stays if this server is killed: %s", record.name, error)

    def race_began(self, name: str) -> None:
        """Registers the branch of a race's candidate. Blocks; called in the race's thread."""
        with suppress(BranchError):  # it has ended already
            record = self.workspace.reopen(name).inspect()
            self._racing[record.id] = record
            self._claim(record)

    def race_ended(self, names: Sequence[str]) -> None:
        """Unregisters the branches of a race that has ended."""
        for record in [each for each in self._racing.values() if each.name in names]:
            del self._racing[record.id]
            self._leases.drop(record)

    async def adopt(self, name: str) -> None:
        """Registers an open branch: it is aborted when the server ends."""
        branch = await self.find(name)
        await run_short(lambda: self.own(branch))

    async def keep(self, name: str) -> None:
        """Leaves a branch open when the server ends."""
        record = await run_short((await self.find(name)).inspect)
        if record.id in self._racing:
            raise BranchError(
                f"branch {name!r} was not kept: the race that tries it commits it or drops it",
                hint="call the race with commit=false: the winner's branch is left open",
                branch=name,
            )
        if self._made.pop(record.id, None) is not None:
            await run_short(partial(self._leases.drop, record))

    def is_kept(self, record: BranchRecord) -> bool:
        """Returns whether the branch stays open when the server ends."""
        if record.id in self._racing:
            return False
        return self.rules.propose or record.id not in self._made

    async def commit(
        self,
        name: str,
        *,
        only: Sequence[str] = (),
        exclude: Sequence[str] = (),
        drop_rest: bool = False,
        force: bool = False,
        skip: bool = False,
        dry_run: bool = False,
    ) -> tuple[list[Change], int]:
        """Commits a branch to its parent; see `Branch.commit` for the options.

        Siblings stay open, and a stale branch is rebased first. So several agents can commit
        changes of different paths in one directory.

        Returns:
            The changes, and the number of changed paths that stay in the branch.

        Raises:
            BranchError: A command runs in the branch.
            CommitError: The commit was refused.
        """
        branch = await self.find(name)
        if not dry_run:
            self._check_idle(name, "committed")
        with self.running(name, CancelScope()):  # nothing starts in it meanwhile
            changes = await run_short(
                lambda: branch.commit(
                    only=only,
                    exclude=exclude,
                    drop_rest=drop_rest,
                    force=force,
                    skip=skip,
                    policy=self.workspace.concurrent_policy,
                    rebase=True,
                    dry_run=dry_run,
                )
            )
            return changes, branch.remaining

    async def rebase(self, name: str, *, force: bool = False) -> list[str]:
        """Forks a branch again from its parent's present state, and keeps its changes.

        Returns:
            The conflicting paths of which `force` kept the branch's version.

        Raises:
            BranchError: A command runs in the branch.
            ConflictError: Branch and parent changed the same paths, and `force` is not set.
        """
        branch = await self.find(name)
        self._check_idle(name, "rebased")
        with self.running(name, CancelScope()):
            return await run_short(partial(branch.rebase, force=force))

    async def last_commit(self, name: str) -> int | None:
        """Returns the id of the last commit of a branch with this name, None if there is none."""
        records = await run_short(self.workspace.history)
        ids = [each.id for each in records if each.branch == name and each.undone is None]
        return ids[-1] if ids else None

    async def undo(self, commit: int | None, *, force: bool, dry_run: bool) -> Reversal:
        """Undoes the last commit to the workspace. Raises BranchError if that is not `commit`."""
        if commit is not None:
            last = (await run_short(partial(self.workspace.undo, force=True, dry_run=True))).commit
            if last.id != commit:
                raise BranchError(
                    f"commit {commit} was not undone: the last commit is {last.id}, of branch "
                    f"{last.branch!r}. Nothing was changed",
                    hint="branch_history lists the commits. Undo only what you committed; ask the "
                    "user about commits of others",
                )
        return await run_short(partial(self.workspace.undo, force=force, dry_run=dry_run))

    def _check_idle(self, name: str, what: str) -> None:
        if self._running.get(name):
            raise BranchError(
                f"something still runs in branch {name!r}: it was not {what}",
                hint="wait until it ends, or end it: branch_stop for a command in the "
                "background, session_end for a session; branch_abort ends it and drops the "
                "branch",
                branch=name,
            )

    async def abort(self, name: str) -> list[Change]:
        """Ends the commands in a branch, and aborts it with its children. Returns its changes."""
        branch = await self.find(name)
        for run in list(self._running.get(name, ())):
            run.scope.cancel(STOP_GRACE_SECONDS)
            await run.ended.wait()
        changes: list[Change] = []
        with suppress(BranchingError):  # if they cannot be listed, it is aborted all the same
            changes = await run_short(branch.diff)
        await run_short(branch.abort)
        return changes

    @contextmanager
    def running(self, name: str, scope: CancelScope) -> Iterator[None]:
        """Registers a command in a branch for the length of the `with`."""
        end = self.begin(name, scope)
        try:
            yield
        finally:
            end()

    def begin(self, name: str, scope: CancelScope) -> Callable[[], None]:
        """Registers a command in a branch. Returns the function to call at its end."""
        run = _Run(scope)
        self._running.setdefault(name, set()).add(run)

        def end() -> None:
            self._running[name].discard(run)
            if not self._running[name]:
                del self._running[name]
            run.ended.set()

        return end

    def background_of(self, name: str) -> list[str]:
        """Returns the ids of the background commands that run in a branch."""
        return [
            each.id for each in self.background.values() if each.branch == name and each.is_running
        ]

    # Files.

    async def tree(self, name: str, path: str) -> ConfinedDir:
        """Returns access to the files of a branch or of the workspace.

        Args:
            name: The branch, or "main".
            path: The path that will be used.

        Raises:
            PermissionError: The rules hide the path, or a file of which it is a hard link.
            OSError: The path is in the store.
        """
        if path.split("/", maxsplit=1)[0] == STORE_NAME:
            raise OSError(errno.EPERM, "the store of the branches is not part of a branch", path)
        top = self.workspace.path if name == MAIN else (await self.find(name)).path
        if self.rules.hide:
            await run_short(partial(self._check_visible, top, path))
        return ConfinedDir(top, self.workspace.owner)

    def _check_visible(self, top: Path, path: str) -> None:
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise OSError(errno.EXDEV, "a path goes down only, where files are hidden", path)
        place = str(top.resolve())
        finder = self._finders.pop(place, None) or Finder(place, self.rules.hide)
        self._finders[place] = finder  # moved to the end: the most recently used
        for other in list(self._finders)[:-FINDERS_MAX]:
            self._finders.pop(other, None)
        if parts and finder.hides("/".join(parts)):
            raise PermissionError(errno.EACCES, "hidden by the rules of this server", path)

    # Opening and closing.

    async def __aenter__(self) -> WorkspaceSession:
        try:
            dropped = await run_short(partial(drop_orphaned, self.workspace))
        except (BranchingError, OSError) as error:
            _log.warning("a server that was killed has left branches: %s", error)
        else:
            if dropped:
                names = ", ".join(record.name for record in dropped)
                _log.warning("dropped what a server that was killed has left: %s", names)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with anyio.CancelScope(shield=True):
            for runs in list(self._running.values()):
                for run in list(runs):
                    run.scope.cancel(STOP_GRACE_SECONDS)
                    await run.ended.wait()
            failure = await run_short(self._drop_all)
        if failure is not None:
            if error is None:
                raise failure
            add_note(error, f"and a branch stays open: {failure}")

    def _drop_all(self) -> BranchingError | None:
        failure: BranchingError | None = None
        # Children are younger than their parents and go before them.
        for record in reversed(self.workspace.branches()):
            if record.id in self._made:
                try:
                    branch = self.workspace.reopen(record.name)
                    if self.rules.propose and branch.diff():
                        continue  # it is the user's to commit
                    branch.abort()
                except BranchNotFoundError:
                    pass  # it went with its parent
                except BranchingError as error:
                    failure = failure or error
        if failure is None:
            self._leases.close()
        return failure


class _Run:
    """A command that runs in a branch."""

    def __init__(self, scope: CancelScope) -> None:
        self.scope = scope
        self.ended = anyio.Event()


HOST_VARIABLE = "BRANCHING_HOST_WORKSPACE"
"""In a container: what the workspace's directory is called outside, where the client is."""


def host_directories() -> tuple[Path, ...]:
    """Returns the workspace's path on the host, if the wrapper has passed it."""
    told = os.environ.get(HOST_VARIABLE)
    return (Path(told),) if told else ()
