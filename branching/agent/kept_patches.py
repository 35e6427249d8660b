"""Saves the changes of a fork's branches as patches in the run log before they are aborted.

For a fork that ends without a decision: its run raised or was cancelled, and its store is in memory
only. `branching log --patch NAME` prints a patch for `git apply`.
"""

from __future__ import annotations

from collections.abc import Iterable

from branching.agent.branch_runtime import BranchRuntime
from branching.fs import Workspace
from branching.runlog.events import Event
from branching.runlog.patches import WHOLE_PATCH_BYTES_MAX, read_patch
from branching.runlog.run_log import RunLog


def keep_patches(space: Workspace, branches: Iterable[BranchRuntime]) -> list[str]:
    """Keeps the patch of each branch that changed anything. The runs are stopped.

    Returns:
        The names of the branches of which a patch is kept.
    """
    if space.store is None:
        return []
    logs = space.store / "logs"
    kept = []
    with RunLog.of(space, "fork", keeps_store=True) as log:
        write = log.and_then(lambda _: None)
        for index, branch in enumerate(branches):
            if branch.branch is None:
                continue
            name, label = branch.branch.name, f"{branch.spec.label}: {branch.spec.steer}"
            has_log = (logs / f"{name}.json").exists()
            start = Event(
                kind="resumed" if has_log else "started", index=index, branch=name, label=label
            )
            write(start)
            log.keep_patch(branch.branch, WHOLE_PATCH_BYTES_MAX)
            state, text = branch.status.state, branch.status.error or ""
            write(Event(kind="finished", index=index, branch=name, state=state, text=text))
            if read_patch(logs, name) is not None:
                kept.append(name)
    return kept
