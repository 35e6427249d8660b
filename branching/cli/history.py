"""`branching history`: the commits that can be undone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from branching.cli.error_handling import handle_errors
from branching.cli.options import JsonOption, WorkspaceOption
from branching.cli.output import print_json, size_phrase
from branching.cli.table import note_empty, table_lines, time_text
from branching.cli.workspace import opened_workspace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from branching.fs import CommitRecord


def history(workspace: WorkspaceOption = None, json: JsonOption = False) -> None:
    """List the commits to the workspace that can be undone or redone, the oldest first.

    SIZE is the disk space that the undo needs. branching show ID lists the paths of a commit, and
    branching undo ID undoes it.

    Example: branching history
    """
    with handle_errors(json=json):
        with opened_workspace(workspace) as space:
            commits = space.history()
        if json:
            print_json("history", commits=[vars(commit) for commit in commits])
            return
        if not commits:
            note_empty("no commit can be undone")
        for line in commit_table(commits):
            print(line)


def commit_table(commits: Sequence[CommitRecord]) -> list[str]:
    """Returns the lines of a table of commits."""
    rows = [
        (
            str(commit.id),
            time_text(commit.committed),
            "committed" if commit.undone is None else "undone",
            str(commit.changes),
            size_phrase(commit.bytes),
            commit.branch,
        )
        for commit in commits
    ]
    return table_lines(("ID", "COMMITTED", "STATE", "PATHS", "SIZE", "BRANCH"), rows, right=(3, 4))
