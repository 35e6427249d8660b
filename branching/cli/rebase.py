"""`branching rebase`: a branch is forked anew from the workspace's present state."""

from __future__ import annotations

from typing import Annotated

import typer

from branching.cli.error_handling import handle_errors
from branching.cli.options import BranchArgument, JsonOption, WorkspaceOption
from branching.cli.output import print_json
from branching.cli.workspace import opened_workspace


def rebase(
    name: BranchArgument,
    workspace: WorkspaceOption = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Keep the branch's version of paths that both sides changed."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Report conflicting paths and change nothing.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Fork a kept branch anew from the workspace as it is now, with its changes on top.

    A branch is stale when a sibling was committed first. After the rebase it can be used and
    committed again. Paths that both sides changed are listed, and nothing is overwritten
    without --force.

    Example: branching rebase run-1a2b3c4d
    """
    with handle_errors(json=json):
        with opened_workspace(workspace) as space:
            conflicts = space.reopen(name).rebase(force=force, dry_run=dry_run)
        action = "none" if dry_run else "rebased"
        if json:
            print_json("rebase", branch=name, action=action, conflicts=conflicts)
        else:
            print(f"branch: {name}\naction: {action}")
            for path in conflicts:
                print(f"  kept the branch's version of {path}")
