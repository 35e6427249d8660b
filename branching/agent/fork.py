"""One fork: its branches, its money, its files; how it is made, kept, and found again.

Everything here blocks or is immediate; what waits for runs is in `run_supervisor`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

from branching.agent.branch_runtime import BranchRuntime, now
from branching.agent.budget import Ledger
from branching.agent.errors import ForkStateError
from branching.agent.fork_files import ForkFiles, Names
from branching.agent.fork_state import ForkState, KeptBranch, Phase
from branching.agent.parent_workspace import ParentWorkspace
from branching.agent.protocols import ConversationCodec, History
from branching.agent.types import (
    BranchIsolation,
    BranchSpec,
    ForkHandle,
    MergeStrategy,
)
from branching.errors import BranchingError, add_note
from branching.fs import Branch
from branching.runlog.patches import PATCH_BYTES_MAX, WHOLE_PATCH_BYTES_MAX

LABEL_CHARACTERS_MAX = 80
"""Of a label in the name of a branch."""


def new_fork_id() -> str:
    return secrets.token_hex(4)


@dataclass(kw_only=True)
class Fork:
    """One fork, from before its branches are made until it is resolved."""

    fork_id: str
    codec: ConversationCodec
    ledger: Ledger
    isolation: BranchIsolation
    strategy: MergeStrategy
    parent_history: History
    place: ParentWorkspace | None
    depth: int = 0
    lineage: str = ""
    created_at: datetime = field(default_factory=now)
    phase: Phase = "making"
    files: ForkFiles | None = None
    branches: dict[str, BranchRuntime] = field(default_factory=dict)
    checkpoint_id: str | None = None
    winner: str | None = None
    carrier: str | None = None
    about: dict[str, Any] = field(default_factory=dict)
    _names: dict[str, str | None] = field(default_factory=dict)

    @property
    def names(self) -> Names:
        return Names.of(self.fork_id)

    @cached_property
    def _parent_dump(self) -> bytes:
        return self.codec.dump(self.parent_history)

    def handle(self) -> ForkHandle:
        return ForkHandle(
            fork_id=self.fork_id,
            parent_checkpoint_id=self.checkpoint_id,
            branches=tuple(branch.status for branch in self.branches.values()),
            merge_strategy=self.strategy,
            created_at=self.created_at,
        )

    def add(
        self, branch_id: str, spec: BranchSpec, *, deps: Any, on_change: Callable[[], None]
    ) -> BranchRuntime:
        """Puts a branch on the list; its files are made by `make_files`."""
        runtime = BranchRuntime(
            branch_id,
            spec,
            fork_id=self.fork_id,
            codec=self.codec,
            ledger=self.ledger,
            isolation=self.isolation,
            history=self.codec.copy(self.parent_history),
            lineage=self.lineage,
            deps=deps,
            on_change=on_change,
        )
        self.branches[branch_id] = runtime
        has_files = self.place is not None and self.isolation.backend == "copy"
        self._names[branch_id] = self._branch_name(spec.label) if has_files else None
        return runtime

    def make_files(self) -> None:
        """Makes all branches of the file system, or none. Raises MountError."""
        if self.place is None:
            return
        made: list[Branch] = []
        try:
            made.append(self.place.create(self.names.parent))
            for branch_id, name in self._names.items():
                if name is not None:
                    made.append(self.place.create(name))
                    self.branches[branch_id].branch = made[-1]
            # After the last branch was created: later changes are external.
            moment = self.place.now_ns()
        except BaseException as error:
            for branch in made:
                try:
                    branch.abort()
                except BranchingError as failure:
                    add_note(error, f"and a branch is left: {failure}")
            raise
        self.files = ForkFiles(self.place, self.names, parent=made[0], forked_ns=moment)
        self._tell_paths()

    def find_files(self, state: ForkState) -> None:
        """Takes up the branches of a fork whose process has died. ForkStateError if one is gone."""
        if self.place is None:
            return
        parent = self.place.find(self.names.parent)
        if parent is None:
            raise ForkStateError(f"the branches of fork {self.fork_id} are gone")
        for cut_off in (self.names.stage, *(f"{kept.files}.frozen" for kept in state.branches)):
            self.place.drop(cut_off)  # of a merge
        self.files = ForkFiles(
            self.place,
            self.names,
            parent=parent,
            forked_ns=state.forked_ns,
            is_stuck=state.winner is not None and state.carrier == self.names.parent,
        )
        for kept in state.branches:
            runtime = self.branches[kept.status.id]
            self._names[runtime.id] = kept.files
            runtime.branch = self.place.find(kept.files)
        self._tell_paths()

    def drop_files(self) -> list[str]:
        """Aborts the remaining branches, except for kept losers. Returns the failures."""
        if self.files is None:
            return []
        branches = [
            branch.branch
            for branch in self.branches.values()
            if branch.id == self.winner or not branch.keeps()
        ]
        return self.files.drop(*branches, self.files.parent)

    def keep_patches(self) -> None:
        """Saves the patches of the losers, if the fork is logged; without a winner, of all.

        After the winner's commit it would be too late: their parent has changed then.
        """
        bytes_max = PATCH_BYTES_MAX if self.winner else WHOLE_PATCH_BYTES_MAX
        for branch in self.branches.values():
            if branch.id != self.winner and branch.branch is not None and branch.branch.is_open:
                branch.keep_patch(bytes_max)

    def make_anew(self, branch: BranchRuntime) -> None:
        """Resets the files of a branch that does not run to their state at the fork.

        Raises:
            BranchingError: Its branch could not be aborted or created. The call can be repeated.
        """
        made = None
        name = self._names[branch.id]
        if self.place is not None and name is not None:
            self.place.drop(name)
            made = self.place.create(name)
        branch.begin_anew(made)
        if self.place is not None:
            self._tell_paths()

    def drop_by_name(self) -> None:
        """Aborts the branches that a process left which died while it made them."""
        if self.place is not None:
            for name in (*self._names.values(), self.names.parent):
                self.place.drop(name)

    def state(self) -> ForkState:
        """Returns the state to save."""
        place, files = self.place, self.files
        return ForkState(
            fork_id=self.fork_id,
            phase=self.phase,
            created_at=self.created_at,
            workspace=None if place is None else str(place.workspace.root),
            parent=None if place is None else place.name,
            parent_files=None if place is None else self.names.parent,
            forked_ns=0 if files is None else files.forked_ns,
            parent_history=self._parent_dump,
            isolation=self.isolation,
            strategy=self.strategy,
            budget=self.ledger.total,
            depth=self.depth,
            parent_checkpoint_id=self.checkpoint_id,
            carrier=self.carrier,
            winner=self.winner,
            about=self.about,
            branches=tuple(self._kept(branch) for branch in self.branches.values()),
        )

    def _kept(self, branch: BranchRuntime) -> KeptBranch:
        return KeptBranch(
            spec=branch.spec,
            status=branch.status,
            files=self._names.get(branch.id),
            usage=branch.cost_tracker,
            history=branch.dumped_history(),
            blocked=branch.blocked_commands,
        )

    def _tell_paths(self) -> None:
        assert self.place is not None
        assert self.files is not None
        for branch in self.branches.values():
            branch.owner = self.place.workspace.owner
            branch.base_path = self.place.path
            if branch.branch is not None:
                branch.path = branch.branch.path
            elif self.isolation.backend == "share":
                branch.path = self.files.parent.path
            elif self.isolation.backend == "share_readonly":
                branch.path = self.place.path

    def _branch_name(self, label: str) -> str:
        slug = (
            re.sub(r"[^A-Za-z0-9._-]+", "-", label)[:LABEL_CHARACTERS_MAX].strip(".-") or "branch"
        )
        taken = {name for name in self._names.values() if name is not None}
        name = f"{self.fork_id}-{slug}"
        return name if name not in taken else f"{name}-{len(self._names)}"


def check_specs(specs: Sequence[BranchSpec]) -> None:
    """Raises ValueError for specs that do not describe a valid fork."""
    if not specs:
        raise ValueError("a fork needs at least one branch")
    labels = [spec.label.strip() for spec in specs]
    if not all(labels):
        raise ValueError("each branch needs a label")
    if repeated := [label for label in labels if labels.count(label) > 1]:
        raise ValueError(f"labels must differ: {repeated[0]!r} is used twice")
