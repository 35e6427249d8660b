"""Removes states that are no longer needed, for `branching prune`.

Open forks stay, with their checkpoints, archives of existing branches, and interrupted rewinds.
"""

from __future__ import annotations

from pathlib import Path

from branching.agent.checkpoint_store import SQLiteCheckpointStore
from branching.agent.database import place_of_database
from branching.agent.fork_state import ForkState
from branching.agent.fork_store import SQLiteForkStateStore
from branching.agent.merge_override import Override, kept
from branching.agent.parent_workspace import ParentWorkspace
from branching.fs import Workspace


def prune(workspace: Workspace) -> int:
    """Forgets checkpoints and overrides of main and of branches that are gone, and forks whose
    branches are; returns how many. ForkStoreError if the database is damaged or busy."""
    if workspace.store is None or not place_of_database(workspace).exists():
        return 0
    open_branches = {record.name for record in workspace.branches()}
    forks = SQLiteForkStateStore.beside(workspace)
    checkpoints = SQLiteCheckpointStore.beside(workspace)
    try:
        assert forks.home is not None, "it is a directory"
        forgotten = _overrides(forks, forks.home, ParentWorkspace(workspace), open_branches)
        needed = set()
        for state in forks.list_all():
            if _is_over(state, open_branches):
                forks.remove(state.fork_id)
                forgotten += 1
            else:
                needed.add(state.parent_checkpoint_id)
        return forgotten + checkpoints.prune(needed, open_branches)
    finally:
        forks.close()
        checkpoints.close()


def _overrides(
    forks: SQLiteForkStateStore, home: Path, place: ParentWorkspace, open_branches: set[str]
) -> int:
    forgotten = 0
    for fork_id, branch in list(kept(home)):
        if branch not in open_branches and (found := Override.find(fork_id, place, home)):
            found.forget()
            forks.remove(fork_id)
            forgotten += 1
    return forgotten


def _is_over(state: ForkState, open_branches: set[str]) -> bool:
    """Its branches were dropped by hand. One that is resolved is with its override."""
    mine = {state.parent_files, *(branch.files for branch in state.branches)}
    return state.phase != "resolved" and state.workspace is not None and not mine & open_branches
