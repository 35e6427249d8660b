"""`branching diff`: what a branch would commit."""

from __future__ import annotations

from branching.cli.failure import reported
from branching.cli.options import BranchArgument, JsonOption, WorkspaceOption
from branching.cli.place import open_workspace
from branching.cli.report import print_json

_LETTERS = {
    "added": "A",
    "modified": "M",
    "deleted": "D",
    "renamed": "R",
    "type": "T",
    "metadata": "m",
}


def diff(name: BranchArgument, workspace: WorkspaceOption = None, json: JsonOption = False) -> None:
    """List what a branch changed: A added, M modified, D deleted, R renamed, T type, m metadata.

    Example: branching diff run-1a2b3c4d
    """
    with reported(json=json):
        space = open_workspace(workspace)
        changes = space.reopen(name).diff()
        space.close()
        if json:
            print_json(
                "diff",
                branch=name,
                changes=[
                    {
                        "path": change.path,
                        "change": change.change,
                        "kind": change.kind,
                        **({"from": change.origin} if change.origin else {}),
                    }
                    for change in changes
                ],
            )
            return
        for change in changes:
            origin = f" (from {change.origin})" if change.origin else ""
            print(f"{_LETTERS.get(change.change, '?')} {change.path}{origin}")
