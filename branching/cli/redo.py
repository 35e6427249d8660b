"""`branching redo`: the commit that was undone is there again."""

from __future__ import annotations

from typing import Annotated

import typer

from branching.cli.failure import reported
from branching.cli.options import JsonOption, WorkspaceOption
from branching.cli.place import opened_workspace
from branching.cli.report import print_reversal


def redo(
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
    """Make the commit that was undone last again, all or nothing.

    What others have changed of it since is listed, and nothing is redone; --force sets their
    changes aside. Branches that are open go stale by --force.

    Example: branching redo --dry-run
    """
    with reported(json=json):
        with opened_workspace(workspace) as space:
            reversal = space.redo(force=force, dry_run=dry_run)
        print_reversal("redo", "none" if dry_run else "redone", reversal, json=json)
