"""`branching rebase`: a branch is forked anew from the workspace's present state."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from branching._sanitize import line_for
from branching.cli.error_handling import handle_errors
from branching.cli.options import BranchArgument, JsonOption, WorkspaceOption
from branching.cli.output import note_result, print_json
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
    """Rebase a branch onto the present state of the workspace, with its changes on top.

    A branch is stale when a sibling was committed first. After the rebase it can be used and
    committed again. Paths that both sides changed are listed, and nothing is overwritten without
    --force.

    Example: branching rebase run-1a2b3c4d
    """
    with handle_errors(json=json):
        with opened_workspace(workspace) as space:
            conflicts = space.reopen(name).rebase(force=force, dry_run=dry_run)
        action = "none" if dry_run else "rebased"
        if json:
            print_json("rebase", branch=name, action=action, conflicts=conflicts)
        else:
            for path in conflicts:
                print(line_for(sys.stdout, f"  kept the branch's version of {path}"), flush=True)
            note_result(f"{'would rebase' if dry_run else 'rebased'} branch {name}")
