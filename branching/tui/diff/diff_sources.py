"""The files of two branches beside one another: which differ, and what is in them.

All of it blocks: these are errands."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

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
