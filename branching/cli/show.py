"""`branching show`: what a commit of the history changed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from branching.cli.error_handling import UsageFault, handle_errors, note
from branching.cli.options import JsonOption, WorkspaceOption
from branching.cli.output import (
    change_facts,
    change_lines,
    coloured_change,
    paths_phrase,
    print_json,
)
from branching.cli.pager import NoPagerOption, patch_lines, show_lines, show_text
from branching.cli.table import local_time, time_ago
from branching.cli.workspace import opened_workspace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from branching.fs import CommitRecord

CommitArgument = Annotated[
    str,
    typer.Argument(
        metavar="COMMIT",
        help="Id of a commit, as branching history lists it, or the name of its branch.",
        show_default=False,
    ),
]


def show(
    commit: CommitArgument,
    patch: Annotated[
        bool,
        typer.Option(
            "-p",
            "--patch",
            help="Print the patch, which is saved for candidates of races and forks.",
        ),
    ] = False,
    workspace: WorkspaceOption = None,
    no_pager: NoPagerOption = False,
    json: JsonOption = False,
) -> None:
    """Show a commit of the history: its branch, its time and the paths that it changed.

    Example: branching show run-1a2b3c4d
    """
    with handle_errors(json=json):
        from branching.runlog.patches import read_patch

        with opened_workspace(workspace) as space:
            record, changes = space.show(commit_id(space.history(), commit))
            logs = None if space.store is None else space.store / "logs"
            kept = read_patch(logs, record.branch) if patch and logs is not None else None
        if json:
            text = {"patch": kept.decode("utf-8", "replace") if kept else None} if patch else {}
            print_json("show", commit=vars(record), changes=change_facts(changes), **text)
            return
        if patch:
            if kept is None:
                note(f"no patch was saved for branch {record.branch}: only candidates have one")
            show_lines(patch_lines((kept or b"").splitlines(keepends=True)), pager=not no_pager)
            return
        moment = local_time(record.committed)
        state = "" if record.undone is None else f", undone {time_ago(record.undone)}"
        lines = [
            f"commit {record.id}",
            f"branch {record.branch}",
            f"committed {time_ago(record.committed)} ({moment:%Y-%m-%d %H:%M:%S}){state}",
            f"changed {paths_phrase(changes)}",
        ]
        lines += [f"  {coloured_change(line)}" for line in change_lines(changes)]
        show_text(lines, pager=not no_pager)
        sys.stdout.flush()


def commit_id(commits: Sequence[CommitRecord], text: str) -> int:
    """Returns the id of the commit in the history that `text` names by its id or its branch.

    Raises:
        UsageFault: There is no such commit in the history.
    """
    found = [each.id for each in commits if text in (str(each.id), each.branch)]
    if not found:
        raise UsageFault(f"there is no commit {text!r} in the history; branching history lists it")
    return found[-1]
