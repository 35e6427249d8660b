"""`branching undo`: the last commit never was."""

from __future__ import annotations

from typing import Annotated

import typer

from branching.cli.failure import reported
from branching.cli.options import JsonOption, WorkspaceOption
from branching.cli.place import opened_workspace
from branching.cli.report import print_reversal


def undo(
    workspace: WorkspaceOption = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Also where others have changed the same paths since, or branches are open.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tell what would be changed, and do nothing.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Take the last commit to the workspace back, all or nothing; again, the one before it.

    What others have changed of it since is listed, and nothing is undone; --force sets their
    changes aside. Branches that are open go stale by --force.

    Example: branching undo --dry-run
    """
    with reported(json=json):
        with opened_workspace(workspace) as space:
            reversal = space.undo(force=force, dry_run=dry_run)
        print_reversal("undo", "none" if dry_run else "undone", reversal, json=json)
