"""The files of two branches, or of a fork's report, side by side: which differ, and how.

The functions access files and may block."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

from branching.agent.types import BranchChange, BranchDiffReport, PathDiff
from branching.fs import Workspace
from branching.fs.backend import MAIN_ID
from branching.fs.confined_dir import ConfinedDir
from branching.tui.diff.line_diff import SIDE_BYTES_MAX, Comparison, compare
from branching.tui.formatting import letter
from branching.tui.watch.workspace_monitor import BranchView


@dataclass(frozen=True, kw_only=True)
class BranchPair:
    """What is compared: a branch with its parent, or with another branch."""

    left_name: str
    right_name: str
    left: Path
    right: Path
    owner: tuple[int, int]
    paths: tuple[str, ...]
    """Files that one of the two has changed, sorted."""
    origins: dict[str, str]
    """Where renamed files were on the left."""
    letters: dict[str, str]
    """How each path was changed, if the left side is the parent."""

    def title(self, path: str) -> str:
        """Returns what stands for a path in the list."""
        return f"{self.letters[path]} {path}" if path in self.letters else path

    def compared(self, path: str) -> Comparison:
        """Reads one file on both sides."""
        left = _content(ConfinedDir(self.left, self.owner), self.origins.get(path, path))
        return compare(path, left, _content(ConfinedDir(self.right, self.owner), path))


def pair(space: Workspace, view: BranchView, other: BranchView | None = None) -> BranchPair:
    """Brings a branch together with its parent, or with another one.

    Raises BranchingError when one of them is gone.
    """
    branch = space.reopen(view.name)
    record = branch.inspect()
    changes = branch.diff()
    origins = {change.path: change.origin for change in changes if change.origin}
    letters = {change.path: letter(change.change) for change in changes}
    if other is not None:
        partner = space.reopen(other.name)
        changes = [*changes, *partner.diff()]
        left_name, left, origins = other.name, partner.path, {}
        letters = {}
    elif record.parent == MAIN_ID:
        left_name, left = "main", space.root
    else:
        [parent] = [found for found in space.branches() if found.id == record.parent]
        left_name, left = parent.name, parent.path
    paths = {change.path for change in changes if change.kind != "directory"}
    return BranchPair(
        left_name=left_name,
        right_name=view.name,
        left=left,
        right=record.path,
        owner=space.owner,
        paths=tuple(sorted(paths)),
        origins=origins,
        letters=letters,
    )


def _content(tree: ConfinedDir, path: str) -> bytes | str | None:
    try:
        data, size = tree.read(path, limit=SIDE_BYTES_MAX)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return f"[{path}: a symbolic link, which is not followed]"
        return f"[{path}: {error.strerror}]"
    if size > SIDE_BYTES_MAX:
        return f"[{path}: {size} bytes, too long to be shown]"
    return data


_LETTERS = {"created": "A", "modified": "M", "deleted": "D"}


class ReportSource:
    """The touched paths times the branches that touched them."""

    left_name = "at the fork"
    right_name = "in the branch"

    def __init__(self, report: BranchDiffReport) -> None:
        self._found = {
            _name(diff, change): (diff, change)
            for diff in report.paths
            for change in diff.branches.values()
            if change.operation in _LETTERS
        }
        self.paths = tuple(self._found)

    def title(self, path: str) -> str:
        """Returns the line of one of them, which says all by itself."""
        return path

    def compared(self, path: str) -> Comparison:
        """Compares one path in one branch with what it was."""
        diff, change = self._found[path]
        before, after = diff.parent_content, change.new_content
        if change.is_binary or (before is None and after is None):
            return Comparison(path=diff.path, note=change.unified_diff_vs_parent or "[no text]")
        return compare(
            diff.path,
            None if before is None else before.encode(),
            None if after is None else after.encode(),
        )


def _name(diff: PathDiff, change: BranchChange) -> str:
    letter = _LETTERS[change.operation]
    return f"{letter} {diff.path} · {change.branch_label} ({diff.agreement})"
