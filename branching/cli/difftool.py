"""The changed files of a branch in an editor, each beside its parent's."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from branching.cli.error_handling import UsageFault
from branching.errors import BranchingError

if TYPE_CHECKING:
    from branching.fs import Branch, Change, Workspace

FILES_MAX = 20
"""So many windows; who wants to see more names the files."""


def show(space: Workspace, branch: Branch, changes: list[Change]) -> None:
    """Opens the editor for each changed file, and returns when all are closed.

    The mount may be there for the length of this command only, and the files with it.
    """
    from branching._difftool import VARIABLES, EditorDetector

    kind = EditorDetector.detect()
    if kind == "tui":
        raise UsageFault(
            f"there is no editor: neither pycharm nor code is on PATH. Set {VARIABLES[0]} to a "
            "shell line, such as 'meld {parent} {branches}'"
        )
    files = [change for change in changes if change.kind == "file"]
    if not files:
        raise UsageFault(
            "no changed file can be shown in an editor; branching diff lists the changes"
        )
    if len(files) > FILES_MAX:
        raise UsageFault(
            f"{len(files)} files were changed, and at most {FILES_MAX} are opened at once: name "
            f"some (branching diff {branch.name} --tool PATH...)"
        )
    parent = _parent_of(space, branch)
    with tempfile.TemporaryDirectory(prefix="branching-diff-") as scratch:
        nothing = Path(scratch) / "nothing"
        nothing.touch()
        processes = []
        for change in files:
            old, new = parent / (change.origin or change.path), branch.path / change.path
            old = nothing if change.change == "added" else old
            new = nothing if change.change == "deleted" else new
            processes += EditorDetector.invoke(kind, old, [new], wait=True)
            if kind == "custom":  # it may be one for the terminal
                processes[-1].wait()
        codes = [process.wait() for process in processes]
    if failed := [code for code in codes if code]:
        raise BranchingError(f"the editor ended with exit code {failed[0]}; nothing was changed")


def _parent_of(space: Workspace, branch: Branch) -> Path:
    parent = branch.inspect().parent
    for record in space.branches():
        if record.id == parent:
            return record.path
    return space.root
