"""`branching abort`: a kept branch is dropped."""

from __future__ import annotations

from branching.cli.error_handling import handle_errors
from branching.cli.options import BranchArgument, JsonOption, WorkspaceOption
from branching.cli.output import note_result, print_json
from branching.cli.workspace import opened_workspace


def abort(
    name: BranchArgument, workspace: WorkspaceOption = None, json: JsonOption = False
) -> None:
    """Drop an open branch, with all its changes and its child branches.

    Example: branching abort run-1a2b3c4d
    """
    with handle_errors(json=json):
        with opened_workspace(workspace) as space:
            space.reopen(name).abort()
        if json:
            print_json("abort", branch=name, action="aborted")
        else:
            note_result(f"aborted branch {name}")
