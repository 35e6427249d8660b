"""Resumes a fork after its process has died.

An incomplete fork is aborted. A merge is complete if the branch whose commit completes it has
ended; otherwise it was not started. Runs have ended: their branches keep the conversation of the
last request, and can win. A resolved fork was merged by a judge: its branches have their
conversations, and only the files saved for an override.
"""

from __future__ import annotations

from branching.agent.branch_runtime import FORK_VARIABLE, BranchRuntime
from branching.agent.budget import Ledger
from branching.agent.fork import Fork
from branching.agent.fork_state import ForkState, KeptBranch
from branching.agent.parent_workspace import OWN_BRANCH, ParentWorkspace
from branching.agent.process_cleanup import kill_marked
from branching.agent.protocols import ConversationCodec
from branching.fs import Branch, Workspace

INTERRUPTED = "the process that ran it has ended"


def take_up(
    state: ForkState,
    ledger: Ledger,
    codec: ConversationCodec,
    place: ParentWorkspace | None,
    deps: object,
) -> Fork:
    """Returns the fork as it stands: open, or resolved. Blocks. MountError, BranchError."""
    fork = Fork(
        fork_id=state.fork_id,
        codec=codec,
        ledger=ledger,
        isolation=state.isolation,
        strategy=state.strategy,
        parent_history=codec.load(state.parent_history),
        place=place,
        depth=state.depth,
        created_at=state.created_at,
        checkpoint_id=state.parent_checkpoint_id,
        winner=state.winner,
        phase=state.phase,
        about=dict(state.about),
    )
    for kept in state.branches:
        ledger.open(kept.status.id, kept.spec.limits, kept.usage)
        branch = fork.add(kept.status.id, kept.spec, deps=deps, on_change=lambda: None)
        _restore(branch, kept, codec)
    if state.phase == "resolved":
        return fork
    kill_marked(FORK_VARIABLE, f"{fork.fork_id}/")  # what the dead process has left running
    is_merged = place is not None and state.carrier is not None and not place.find(state.carrier)
    if state.phase == "making" or is_merged:
        fork.drop_by_name()
        fork.phase = "resolved"
        fork.winner = state.winner if is_merged else None
        return fork
    fork.find_files(state)
    fork.phase, fork.carrier, fork.winner = "open", None, None
    return fork


def place_of(state: ForkState) -> Workspace | Branch:
    """Opens the forked workspace or branch. Raises MountError or BranchNotFoundError."""
    workspace = Workspace(state.workspace or "")
    if state.parent is None or state.parent.startswith(OWN_BRANCH):
        return workspace  # the coordinator works in that branch until it lands it
    return workspace.reopen(state.parent)


def _restore(branch: BranchRuntime, kept: KeptBranch, codec: ConversationCodec) -> None:
    branch.status = kept.status
    branch.approvals.blocked.extend(kept.blocked)
    history = codec.load(kept.history) if kept.history else None
    if kept.status.state == "done":
        branch.history = history
    else:
        branch.partial_history = history
    if kept.status.state == "running":
        branch.touch(state="terminated", error=INTERRUPTED)
