"""The saved forks of `branching fork`, which a later command can resume.

    STORE/agents/forks.sqlite       the states, also those of other programs' forks
    STORE/agents/fork-9f3c2a1b      locked by the command that runs the fork, until it ends or
                                    dies. The state has the file's name

A fork whose merge was refused is saved in the same way, to be merged later.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from branching._linux.flock import try_lock
from branching.agent.database import place_of_database
from branching.agent.errors import ForkStateError, ForkStoreError
from branching.agent.fork_store import InMemoryForkStateStore, SQLiteForkStateStore
from branching.fs.store_files import is_locked, is_name, open_file

if TYPE_CHECKING:
    from branching.agent.fork_state import ForkState
    from branching.agent.protocols import ForkStateStore
    from branching.fs import Workspace

_PREFIX = "fork-"
_LOCK = "lock"
"""In what the state says about the fork: the name of its lock."""


class ForkRegistry:
    """The place for one command's fork; open for the length of a `with`."""

    def __init__(self, space: Workspace) -> None:
        self._space = space
        self.store: ForkStateStore = InMemoryForkStateStore()
        self.complaint = ""
        self._directory: Path | None = None
        self._name = ""
        self._lock: int | None = None

    def __enter__(self) -> ForkRegistry:
        """Where nothing can be kept (the store is another user's) `complaint` says so. Inside a
        branch no store is seen, and a fork goes with the branch."""
        if self._space.store is None:
            return self
        path = place_of_database(self._space)
        try:
            self.store = SQLiteForkStateStore(path, owner=self._space.owner)
        except ForkStoreError as error:
            self.complaint = (
                f"this fork cannot be resumed if its command is killed: {error.message}"
            )
        else:
            self._directory = path.parent
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._lock is not None and self._directory is not None:
            with suppress(ForkStoreError):  # then the next command finds it
                if not any(state.about.get(_LOCK) == self._name for state in self.store.list_all()):
                    (self._directory / self._name).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None
        if isinstance(self.store, SQLiteForkStateStore):
            self.store.close()

    @property
    def outlives_us(self) -> bool:
        """Whether a fork that is open at the end is found by the next command."""
        return self._directory is not None

    def new(self) -> dict[str, Any]:
        """Locks a new file, and returns its name for the fork's state."""
        self._take(f"{_PREFIX}{secrets.token_hex(4)}")
        return {_LOCK: self._name}

    def take(self, fork_id: str) -> ForkState:
        """Locks a saved fork. Raises ForkStateError if it does not exist or is running."""
        state = self.store.get(fork_id)
        if state is None or _LOCK not in state.about:
            if self.complaint:
                raise ForkStateError(f"no fork was kept: {self.complaint}")
            others = ", ".join(each.fork_id for each in orphaned_forks(self._space)) or "none"
            raise ForkStateError(
                f"there is no fork {fork_id!r} of `branching fork` here; open forks: {others}"
            )
        self._take(state.about[_LOCK])
        return state

    def _take(self, name: str) -> None:
        self._name = name
        if self._directory is None:
            return
        if not _is_lock(name):  # what the state says may be a stranger's
            raise ForkStateError(f"the state of this fork names no lock of one: {name!r}")
        lock = open_file(self._directory / name, os.O_RDONLY | os.O_CREAT)
        if not try_lock(lock):
            os.close(lock)
            raise ForkStateError("another `branching fork` is running this fork")
        if os.geteuid() == 0:
            os.fchown(lock, *self._space.owner)
        self._lock = lock


@dataclass(frozen=True, kw_only=True)
class OrphanedFork:
    """A fork whose command has ended without it."""

    fork_id: str
    done: int
    """So many of its branches have succeeded."""
    branches: int

    @property
    def note(self) -> str:
        """What to say of it, and what can be done."""
        return (
            f"fork {self.fork_id} is open, and no command is running it ({self.done} of "
            f"{self.branches} branches done): branching fork --resume {self.fork_id} resumes it, "
            f"branching fork --drop {self.fork_id} drops it"
        )


def orphaned_forks(space: Workspace) -> list[OrphanedFork]:
    """Returns the saved forks that no command runs, the oldest first. Raises ForkStoreError."""
    if space.store is None or not place_of_database(space).exists():
        return []
    path = place_of_database(space)
    store = SQLiteForkStateStore(path, owner=space.owner)
    try:
        return [
            OrphanedFork(
                fork_id=state.fork_id,
                done=sum(branch.status.state == "done" for branch in state.branches),
                branches=len(state.branches),
            )
            for state in store.list_all()
            if _is_lock(state.about.get(_LOCK, ""))
            and not _is_attended(path.parent / state.about[_LOCK])
        ]
    finally:
        store.close()


def _is_attended(lock: Path) -> bool:
    try:
        return is_locked(lock)
    except OSError:
        return False


def _is_lock(name: str) -> bool:
    return is_name(name) and name.startswith(_PREFIX)
