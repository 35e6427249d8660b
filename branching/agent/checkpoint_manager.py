"""The checkpoints that a coordinator sets, and the way back to one. All of it blocks."""

from __future__ import annotations

import secrets
import warnings
from dataclasses import replace

from branching.agent.branch_runtime import now
from branching.agent.checkpoint import REWINDING, Checkpoint, TreeMark
from branching.agent.parent_workspace import ParentWorkspace
from branching.agent.protocols import CheckpointStore, ConversationCodec, History
from branching.errors import BranchingError

BEFORE_REWIND = "before-rewind:"


class CheckpointManager:
    """Checkpoints of one parent. Without a store there are none."""

    def __init__(self, store: CheckpointStore | None, codec: ConversationCodec) -> None:
        self.store = store
        self._codec = codec

    def keep(self, label: str, history: History, place: ParentWorkspace | None) -> str | None:
        """Keeps the conversation with the files as they are now; returns the checkpoint's id.

        Files that no archive can hold (sockets) are left out with a warning: the conversation can
        be rewound all the same.
        """
        if self.store is None:
            return None
        checkpoint = self._made(label, history, place)
        self.store.save(checkpoint)
        return checkpoint.id

    def check(self, checkpoint_id: str) -> Checkpoint:
        """Returns a checkpoint. Raises ValueError if it does not exist."""
        checkpoint = None if self.store is None else self.store.get(checkpoint_id)
        if checkpoint is None:
            raise ValueError(f"there is no checkpoint {checkpoint_id!r} (any more)")
        return checkpoint

    def cut_off(self, place: ParentWorkspace | None) -> Checkpoint | None:
        """Returns what a rewind of these files gave up that a process died in; None if none did.

        The label says what to rewind to: `rewinding:<checkpoint id>`.
        """
        if self.store is None or place is None:
            return None
        newest = self.store.newest(place.name)
        return newest if newest and newest.label.startswith(REWINDING) else None

    def rewind(
        self, checkpoint_id: str, history: History, place: ParentWorkspace | None
    ) -> History:
        """Restores the files of a checkpoint and returns its conversation.

        The present state is saved as a checkpoint first, with `history`, and marked until the
        rewind is complete. After an interrupted rewind, its saved state is kept.

        Raises:
            ValueError: The checkpoint does not exist.
        """
        checkpoint = self.check(checkpoint_id)
        assert self.store is not None, "a checkpoint was found"
        restored = self._codec.load(checkpoint.history)
        label = f"{REWINDING}{checkpoint_id}"
        given_up = self.cut_off(place) or self._made(label, history, place)
        given_up = replace(given_up, label=label)
        self.store.save(given_up)
        if place is not None and checkpoint.tree is not None:
            try:
                place.restore(checkpoint.tree)
            except BranchingError:
                if given_up.tree is None or place.is_at(given_up.tree):
                    self.store.remove(given_up.id)
                raise
        self.store.save(replace(given_up, label=f"{BEFORE_REWIND}{checkpoint_id}"))
        return restored

    def _made(self, label: str, history: History, place: ParentWorkspace | None) -> Checkpoint:
        return Checkpoint(
            id=secrets.token_hex(8),
            label=label,
            created_at=now(),
            history=self._codec.dump(history),
            tree=_mark(label, place),
            turn=self._codec.turns(history),
        )


def _mark(label: str, place: ParentWorkspace | None) -> TreeMark | None:
    try:
        return None if place is None else place.mark()
    except BranchingError as error:
        warnings.warn(
            f"checkpoint {label} holds the conversation only: {error.message}", stacklevel=2
        )
        return None
