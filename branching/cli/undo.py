"""`branching undo` and `branching redo`: the last commit never was; it is there again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from branching.cli.error_handling import handle_errors
from branching.cli.options import JsonOption, WorkspaceOption
from branching.cli.output import change_facts, change_lines, print_json
from branching.cli.workspace import opened_workspace

if TYPE_CHECKING:
    from collections.abc import Callable

    from branching.fs import Reversal, Workspace

_ForceOption = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Also where others have changed the same paths since, or branches are open.",
    ),
]
_DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Tell what would be changed, and do nothing.")
]


def undo(
    workspace: WorkspaceOption = None,
    force: _ForceOption = False,
    dry_run: _DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Take the last commit to the workspace back, all or nothing; again, the one before it.

    What others have changed of it since is listed, and nothing is undone; --force sets their
    changes aside. Branches that are open go stale by --force.

    Example: branching undo --dry-run
    """
    action = "none" if dry_run else "undone"
    _run(
        "undo", action, lambda space: space.undo(force=force, dry_run=dry_run), workspace, json=json
    )


def redo(
    workspace: WorkspaceOption = None,
    force: _ForceOption = False,
    dry_run: _DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Make the commit that was undone last again, all or nothing.

    What others have changed of it since is listed, and nothing is redone; --force sets their
    changes aside. Branches that are open go stale by --force.

    Example: branching redo --dry-run
    """
    action = "none" if dry_run else "redone"
    _run(
        "redo", action, lambda space: space.redo(force=force, dry_run=dry_run), workspace, json=json
    )


def _run(
    command: str,
    action: str,
    reverse: Callable[[Workspace], Reversal],
    workspace: Path | None,
    *,
    json: bool,
) -> None:
    with handle_errors(json=json):
        with opened_workspace(workspace) as space:
            reversal = reverse(space)
        if json:
            facts = change_facts(reversal.changes)
            print_json(command, action=action, commit=vars(reversal.commit), changes=facts)
            return
        print(f"branch: {reversal.commit.branch}\naction: {action}")
        print("".join(f"  {line}\n" for line in change_lines(reversal.changes)), end="")
