"""The forks of chats, kept so that the next chat goes on with what a killed one left.

    STORE/agents/             locked by the chat that keeps its forks there; the kernel takes the
    STORE/agents/chat.sqlite  lock away when that dies, however it does

A second chat on the same workspace at the same time keeps its fork in memory, and says so.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from branching._linux.flock import try_lock
from branching.agent.coordinator import ForkCoordinator
from branching.agent.database import place_of_database
from branching.agent.errors import ForkStateError
from branching.agent.fork_state import ForkState
from branching.agent.fork_store import InMemoryForkStateStore, SQLiteForkStateStore
from branching.agent.json_codec import JsonCodec
from branching.agent.protocols import ForkStateStore
from branching.errors import BranchingError
from branching.fs import Workspace

FILE = "chat.sqlite"


class ForkRegistry:
    """Where one chat keeps its forks."""

    def __init__(self, space: Workspace) -> None:
        """Opens the workspace's store; where that cannot be, `complaint` says why."""
        self.store: ForkStateStore = InMemoryForkStateStore()
        self.complaint = ""
        self._space = space
        self._lock: int | None = None
        try:
            self._open(space)
        except (BranchingError, OSError) as error:
            self.complaint = f"a fork of this chat cannot be resumed if the chat is killed: {error}"

    def _open(self, space: Workspace) -> None:
        path = place_of_database(space).with_name(FILE)
        kept = SQLiteForkStateStore(path, owner=space.owner)
        lock = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if not try_lock(lock):
            os.close(lock)
            kept.close()
            raise BranchingError("another chat is open here, and holds the lock")
        self.store, self._lock = kept, lock

    @property
    def outlives_us(self) -> bool:
        """Whether an open fork is there again for the next chat."""
        return self._lock is not None

    def left(self) -> list[ForkState]:
        """Lists the forks of this workspace that chats before us have left, the oldest first."""
        name = self._space.branch_path.rpartition("/")[2]
        parent = None if self._space.branch_path == "/main" else name
        return [state for state in self.store.list_all() if state.parent == parent]

    def close(self) -> None:
        """Releases the lock on the fork store."""
        if self._lock is not None:
            assert isinstance(self.store, SQLiteForkStateStore), "only that is locked"
            self.store.close()
            os.close(self._lock)
            self._lock = None


@dataclass(kw_only=True)
class Opened:
    """What a chat begins with."""

    coordinator: ForkCoordinator
    history: Any = None
    """The conversation, where an earlier chat left one."""
    complaints: list[str] = field(default_factory=list)


async def opened(kept: ForkRegistry, **options: Any) -> Opened:
    """Returns a coordinator with the fork that an earlier chat left, or with none. `options` are
    those of the class; `place` is the workspace."""
    complaints = [kept.complaint] if kept.complaint else []
    codec = options.get("codec") or JsonCodec()
    try:
        left = kept.left()
    except BranchingError as error:
        return Opened(
            coordinator=ForkCoordinator(**options), complaints=[*complaints, error.message]
        )
    for waiting, state in zip(reversed(range(len(left))), left, strict=True):
        try:
            coordinator = await ForkCoordinator.resume(state.fork_id, store=kept.store, **options)
        except ForkStateError as error:
            kept.store.remove(state.fork_id)  # there is nothing left to go on with
            complaints.append(f"of an earlier chat: {error.message}")
        except (BranchingError, ValueError, TypeError) as error:
            complaints.append(
                f"the fork {state.fork_id} of an earlier chat cannot be resumed: {error}; its "
                "branches are still open: branching ls, branching abort NAME"
            )
        else:
            if waiting:
                complaints.append(f"{waiting} more forks of earlier chats wait for the next chat")
            merged = coordinator.last_merge
            history = merged.history_after_merge if merged else codec.load(state.parent_history)
            return Opened(coordinator=coordinator, history=history, complaints=complaints)
    coordinator = ForkCoordinator(store=kept.store, **options)
    return Opened(coordinator=coordinator, complaints=complaints)
