"""The checkpoints that a coordinator sets, and the way back to one. All of it blocks."""

from __future__ import annotations

import secrets
import warnings

from branching.agent.checkpoint import Checkpoint, TreeMark
from branching.agent.place import Place
from branching.agent.protocols import CheckpointStore, ConversationCodec, History
from branching.agent.runtime import now
from branching.errors import BranchingError


class Anchors:
    """Checkpoints of one parent. Without a store there are none."""

    def __init__(self, store: CheckpointStore | None, codec: ConversationCodec) -> None:
        self.store = store
        self._codec = codec

    def keep(self, label: str, history: History, place: Place | None) -> str | None:
        """Keeps the conversation with the files as they are now; returns the checkpoint's id.

        Files that no archive can hold (sockets) are left out with a warning: the conversation can
        be rewound all the same.
        """
        if self.store is None:
            return None
        checkpoint = Checkpoint(
            id=secrets.token_hex(8),
            label=label,
            created_at=now(),
            history=self._codec.dump(history),
            tree=_mark(label, place),
            turn=self._codec.turns(history),
        )
        self.store.save(checkpoint)
        return checkpoint.id

    def check(self, checkpoint_id: str) -> Checkpoint:
        """Returns the checkpoint. ValueError if there is no such one."""
        checkpoint = None if self.store is None else self.store.get(checkpoint_id)
        if checkpoint is None:
            raise ValueError(f"there is no checkpoint {checkpoint_id!r} (any more)")
        return checkpoint

    def rewind(self, checkpoint_id: str, place: Place | None) -> History:
        """Restores the files and returns the conversation. ValueError if there is no such one."""
        checkpoint = self.check(checkpoint_id)
        history = self._codec.load(checkpoint.history)
        if place is not None and checkpoint.tree is not None:
            place.restore(checkpoint.tree)
        return history


def _mark(label: str, place: Place | None) -> TreeMark | None:
    try:
        return None if place is None else place.mark()
    except BranchingError as error:
        warnings.warn(
            f"checkpoint {label} holds the conversation only: {error.message}", stacklevel=2
        )
        return None
