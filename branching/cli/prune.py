"""`branching prune`: room on disk for what nobody will undo."""

from __future__ import annotations

from typing import Annotated

import typer

from branching.cli.error_handling import handle_errors
from branching.cli.options import JsonOption, WorkspaceOption
from branching.cli.output import print_json
from branching.cli.workspace import opened_workspace


def prune(
    workspace: WorkspaceOption = None,
    keep: Annotated[
        int, typer.Option("--keep", min=0, help="How many of the newest commits to keep.")
    ] = 0,
    json: JsonOption = False,
) -> None:
    """Forget commits that could be undone, and give back the room they take. Without --keep the
    output of candidates that have ended is forgotten too, and the checkpoints of agents.

    Branches that were kept are not touched: branching abort drops those.

    Example: branching prune --keep 3
    """
    with handle_errors(json=json):
        from branching.runlog.run_log import forget

        with opened_workspace(workspace) as space:
            removed, size = space.prune(keep)
            if keep == 0 and space.store is not None:
                forget(space.store / "logs")
                if (space.store / "agents").exists():
                    from branching.agent.pruning import prune as forget_checkpoints

                    forget_checkpoints(space)
        if json:
            print_json("prune", removed=removed, bytes=size)
        else:
            print(f"removed: {removed}\nbytes: {size}")
