"""`branching diff`: what a branch would commit."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated

import typer

from branching.cli.error_handling import UsageFault, handle_errors, note
from branching.cli.options import BranchArgument, JsonOption, WorkspaceOption
from branching.cli.output import (
    change_facts,
    change_lines,
    coloured_change,
    counted,
    print_json,
)
from branching.cli.pager import NoPagerOption, patch_lines, show_lines, show_text
from branching.cli.workspace import opened_workspace

if TYPE_CHECKING:
    from pathlib import Path

    from branching.fs import Change


def diff(
    name: BranchArgument,
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH]...",
            help="Show only these files and directories.",
            show_default=False,
        ),
    ] = None,
    workspace: WorkspaceOption = None,
    patch: Annotated[
        bool, typer.Option("-p", "--patch", help="Print a patch for git apply.")
    ] = False,
    stat: Annotated[bool, typer.Option("--stat", help="Count the lines that changed.")] = False,
    tool: Annotated[
        bool,
        typer.Option(
            "--tool",
            help="Open each changed file beside its parent's in an editor: BRANCHING_DIFFTOOL (a "
            "shell line with {parent} and {branches}), pycharm or code.",
        ),
    ] = False,
    no_pager: NoPagerOption = False,
    json: JsonOption = False,
) -> None:
    """List the changes of a branch: A added, M modified, D deleted, R renamed, T type, m metadata.

    On a terminal the list is coloured (not with NO_COLOR) and shown in a pager.

    Example: branching diff --stat run-1a2b3c4d
    """
    with handle_errors(json=json):
        if patch and (stat or json):
            raise UsageFault("--patch cannot be combined with --stat or --json")
        if patch and paths:
            raise UsageFault("--patch prints the whole branch; give no paths")
        if tool and (patch or stat or json):
            raise UsageFault("--tool cannot be combined with --patch, --stat or --json")
        if patch:
            _show_patch(name, workspace, pager=not no_pager)
            return
        with opened_workspace(workspace) as space:
            branch = space.reopen(name)
            if tool:
                from branching.cli.difftool import show

                show(space, branch, _chosen(branch.diff(), paths))
                return
            changes = _chosen(branch.diff(count_lines=stat), paths)
        if json:
            print_json("diff", branch=name, changes=change_facts(changes))
            return
        lines = map(coloured_change, _counted(changes) if stat else change_lines(changes))
        show_text(lines, pager=not no_pager)


def _show_patch(name: str, workspace: Path | None, *, pager: bool) -> None:
    with ExitStack() as stack:
        with opened_workspace(workspace) as space:
            branch = space.reopen(name)
            if sys.stdout.isatty():
                file = stack.enter_context(TemporaryFile())
                left_out = branch.patch(file)
                file.seek(0)
            else:
                file = None
                left_out = branch.patch(sys.stdout.buffer)
        if file is not None:  # the workspace is closed while the user reads
            show_lines(patch_lines(file), pager=pager)
    if left_out:
        note(f"{counted(left_out, 'change')} cannot be represented in a patch")


def _chosen(changes: list[Change], paths: list[str] | None) -> list[Change]:
    wanted = [path.rstrip("/").removeprefix("./") for path in paths or ()]
    return [
        change
        for change in changes
        if not wanted
        or any(change.path == path or change.path.startswith(f"{path}/") for path in wanted)
    ]


def _counted(changes: list[Change]) -> list[str]:
    lines = change_lines(changes)
    width = max(map(len, lines), default=0)
    return [
        f"{line:<{width}}  +{change.lines[0]} -{change.lines[1]}" if change.lines else line
        for line, change in zip(lines, changes, strict=True)
    ]
