"""`branching history`: the commits that can be taken back."""

from __future__ import annotations

from datetime import datetime, timezone

from branching.cli.error_handling import handle_errors
from branching.cli.options import JsonOption, WorkspaceOption
from branching.cli.output import print_json
from branching.cli.workspace import opened_workspace


def history(workspace: WorkspaceOption = None, json: JsonOption = False) -> None:
    """List the commits to the workspace that can be undone, or redone, the oldest first.

    Example: branching history
    """
    with handle_errors(json=json):
        with opened_workspace(workspace) as space:
            commits = space.history()
        if json:
            print_json("history", commits=[vars(commit) for commit in commits])
            return
        for commit in commits:
            when = datetime.fromtimestamp(commit.committed, timezone.utc).astimezone()
            state = "committed" if commit.undone is None else "undone"
            facts = f"{state:<9}  {commit.changes:>6} paths  {commit.bytes:>12} bytes"
            print(f"{commit.id:>4}  {when:%Y-%m-%d %H:%M:%S}  {facts}  {commit.branch}")
