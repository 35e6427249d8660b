"""`branching prune`: room on disk for what nobody will undo."""

from __future__ import annotations

from typing import Annotated

import typer

from branching.cli.error_handling import handle_errors
from branching.cli.options import JsonOption, WorkspaceOption
from branching.cli.output import counted, note_result, print_json, size_phrase
from branching.cli.workspace import opened_workspace


def prune(
    workspace: WorkspaceOption = None,
    keep: Annotated[
        int, typer.Option("--keep", min=0, help="How many of the newest commits to keep.")
    ] = 0,
    bases: Annotated[
        bool,
        typer.Option(
            "--bases",
            help="Instead, remove the bases that branching attempt has unpacked on this machine, "
            "except those in use.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Delete commits from the history, which frees their disk space: they can no longer be undone.

    Without --keep, also delete the output of candidates that have ended, and all checkpoints.
    Open branches are not touched: branching abort drops those.

    Example: branching prune --keep 3
    """
    with handle_errors(json=json):
        from branching.fs.checkpoints import forget_checkpoints
        from branching.runlog.run_log import forget

        if bases:
            from branching.cluster.base_cache import BaseCache

            removed, size = BaseCache().prune()
            _tell(removed, size, "base", json=json)
            return
        with opened_workspace(workspace) as space:
            removed, size = space.prune(keep)
            if keep == 0 and space.store is not None:
                forget(space.store / "logs")
                forget_checkpoints(space.store / "logs")
                if (space.store / "agents").exists():
                    from branching.agent.pruning import prune as prune_forks

                    prune_forks(space)
        _tell(removed, size, "commit", json=json)


def _tell(removed: int, size: int, noun: str, *, json: bool) -> None:
    if json:
        print_json("prune", removed=removed, bytes=size)
    else:
        note_result(f"removed {counted(removed, noun)}", f"freed {size_phrase(size)}")
