"""`branching status`: which workspace this is, and which branches are open."""

from __future__ import annotations

from branching.cli.failure import reported
from branching.cli.options import JsonOption, WorkspaceOption
from branching.cli.place import opened_workspace
from branching.cli.report import print_json


def status(workspace: WorkspaceOption = None, json: JsonOption = False) -> None:
    """Show the workspace and its open branches.

    Example: branching status
    """
    with reported(json=json):
        with opened_workspace(workspace) as space:
            branches = space.branches()
        if json:
            print_json(
                "status",
                workspace=str(space.root),
                base=str(space.base),
                fstype=space.fstype,
                policy=space.policy,
                branches=[branch.name for branch in branches],
            )
            return
        print(f"workspace: {space.root}")
        print(f"fstype: {space.fstype}")
        if not branches:
            print("branches: (none)")
            return
        print(f"branches ({len(branches)}):")
        for branch in branches:
            print(f"  {branch.name}" + (" (stale)" if branch.state == "stale" else ""))
