"""`branching diff`: what a branch would commit."""

from __future__ import annotations

from branching.cli.failure import reported
from branching.cli.options import BranchArgument, JsonOption, WorkspaceOption
from branching.cli.place import opened_workspace
from branching.cli.report import change_facts, change_lines, print_json


def diff(name: BranchArgument, workspace: WorkspaceOption = None, json: JsonOption = False) -> None:
    """List what a branch changed: A added, M modified, D deleted, R renamed, T type, m metadata.

    Example: branching diff run-1a2b3c4d
    """
    with reported(json=json):
        with opened_workspace(workspace) as space:
            changes = space.reopen(name).diff()
        if json:
            print_json("diff", branch=name, changes=change_facts(changes))
        else:
            print("".join(f"{line}\n" for line in change_lines(changes)), end="")
