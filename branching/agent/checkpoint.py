"""Checkpoints: a conversation and its files, which can be restored.

For a branch, a checkpoint has an archive of its changes (its OCI layer). For main, it has a
position in the workspace's history; restoring undoes later commits. Writes to main other than
commits are not in the history, so a session that must be restorable works in a branch.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from datetime import datetime

MAX_CHECKPOINTS = 20
"""Of one place, which is main or a branch. The oldest go first; so do the anchors of forks."""

REWINDING = "rewinding:"
"""Begins the label of what a rewind gives up, until it is done."""


@dataclass(frozen=True, kw_only=True)
class TreeMark:
    """The files of a place at one moment: one of the two."""

    branch: str | None = None
    """Name of the branch; None is main."""
    archive: bytes | None = None
    """What the branch had changed against its parent."""
    commit_id: int | None = None
    """Of main: the newest commit that stood; 0 for none."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A moment of the parent's work."""

    id: str
    label: str
    """`fork:<fork id>`, `post-fork:<fork id>`, `before-rewind:<checkpoint id>`, or what the caller
    said. `rewinding:<checkpoint id>` as long as that rewind is not done."""
    created_at: datetime
    history: bytes
    """As the codec dumps it."""
    tree: TreeMark | None = None
    """None where the files are shared, or could not be kept."""
    turn: int = 0

    @property
    def branch(self) -> str | None:
        """Name of the branch whose files it has; None for main, or without files."""
        return None if self.tree is None else self.tree.branch


class InMemoryCheckpointStore:
    """Keeps the newest checkpoints of each place in memory. Safe from any thread."""

    def __init__(self, max_checkpoints: int = MAX_CHECKPOINTS) -> None:
        self._kept: OrderedDict[str, Checkpoint] = OrderedDict()
        self._most = max_checkpoints
        self._lock = threading.Lock()

    def save(self, checkpoint: Checkpoint) -> None:
        with self._lock:
            self._kept[checkpoint.id] = checkpoint
            self._kept.move_to_end(checkpoint.id)
            mine = [kept.id for kept in self._kept.values() if kept.branch == checkpoint.branch]
            for oldest in mine[: -self._most]:
                del self._kept[oldest]

    def get(self, checkpoint_id: str) -> Checkpoint | None:
        return self._kept.get(checkpoint_id)

    def newest(self, branch: str | None) -> Checkpoint | None:
        with self._lock:
            mine = [kept for kept in self._kept.values() if kept.branch == branch]
            return mine[-1] if mine else None

    def list_all(self) -> list[Checkpoint]:
        with self._lock:
            return list(self._kept.values())

    def remove(self, checkpoint_id: str) -> None:
        with self._lock:
            self._kept.pop(checkpoint_id, None)
