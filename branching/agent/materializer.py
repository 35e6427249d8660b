"""Mirrors the changes of a fork in ordinary directories, for editors and people.

    ROOT/.pydantic-deep/forks/<fork id>/
      manifest.json               the fork, its branches and their states
      parent/PATH                 read-only: the file as it was at the fork
      branches/<label>/PATH       the file as the branch has it now

It has touched paths only. It is updated at each step of a run and each change of state, and is
removed with the fork unless it is to be kept. It is read-only in effect: writes here do not reach a
branch. All methods block.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from branching.agent.branch_files import read_whole
from branching.agent.branch_runtime import BranchRuntime
from branching.agent.changed_paths import touched
from branching.fs.confined_dir import ConfinedDir

DIRECTORY = Path(".pydantic-deep", "forks")
_PARTS = ("parent", "branches")
FILE_BYTES_MAX = 16 << 20
"""Bigger files are left out, since they are not read in an editor."""


class Mirror:
    """The layout of one fork."""

    def __init__(self, root: Path, fork_id: str) -> None:
        self.path = root / DIRECTORY / fork_id
        self._fork_id = fork_id
        self._copied: dict[Path, tuple[int, int, int]] = {}

    def refresh(self, branches: Iterable[BranchRuntime]) -> None:
        """Brings it up to date. OSError if the directory cannot be written."""
        branches = list(branches)
        self._refuse_links()
        for branch in branches:
            if branch.branch is not None and branch.base_path is not None and branch.branch.is_open:
                self._refresh(branch, branch.base_path)
        manifest = {
            "fork_id": self._fork_id,
            "branches": [
                {
                    "id": branch.id,
                    "label": branch.spec.label,
                    "directory": f"branches/{directory_name(branch.spec.label)}",
                    "state": branch.status.state,
                    "error": branch.status.error,
                    "turns": branch.status.current_turn,
                }
                for branch in branches
            ],
        }
        self.path.mkdir(parents=True, exist_ok=True)
        _replace(self.path / "manifest.json", json.dumps(manifest, indent=2).encode())

    def _refuse_links(self) -> None:
        """Raises OSError for a symbolic link where the mirror has a directory: the root may be the
        workspace, where a merged branch can leave one that leads out of it."""
        above = self.path.parent
        for directory in (above.parent, above, self.path, *map(self.path.joinpath, _PARTS)):
            if directory.is_symlink():
                raise OSError(errno.ELOOP, "there is a symbolic link in its place", str(directory))

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        for empty in (self.path.parent, self.path.parent.parent):
            try:
                empty.rmdir()
            except OSError:
                return  # other forks, or files of others

    def _refresh(self, branch: BranchRuntime, base_path: Path) -> None:
        assert branch.branch is not None, "asked by the caller"
        base, tree = (
            ConfinedDir(base_path, branch.owner),
            ConfinedDir(branch.branch.path, branch.owner),
        )
        mine = self.path / "branches" / directory_name(branch.spec.label)
        mine.mkdir(parents=True, exist_ok=True)
        wanted = {path for path in touched(branch.branch.diff(), base, tree) if is_inside(path)}
        for path in sorted(wanted):
            self._copy(base, self.path / "parent", path, is_frozen=True)
            self._copy(tree, mine, path)
        for directory, _, names in os.walk(mine):
            for name in names:
                there = Path(directory, name)
                if str(there.relative_to(mine)) not in wanted:
                    there.unlink()  # undone since

    def _copy(self, tree: ConfinedDir, top: Path, path: str, *, is_frozen: bool = False) -> None:
        place = top / path
        found = tree.lstat(path)
        if found is None or not stat.S_ISREG(found.st_mode) or found.st_size > FILE_BYTES_MAX:
            self._copied.pop(place, None)
            if not place.is_dir():
                place.unlink(missing_ok=True)
            return
        version = (found.st_ino, found.st_size, found.st_mtime_ns)
        if self._copied.get(place) == version:
            return
        for above in reversed(place.relative_to(top).parents):
            if (top / above).is_file():
                (top / above).unlink()  # a file before, and a directory now
        if place.is_dir():
            shutil.rmtree(place)
        place.parent.mkdir(parents=True, exist_ok=True)
        _replace(place, read_whole(tree, path), 0o444 if is_frozen else 0o644)
        self._copied[place] = version


def directory_name(label: str) -> str:
    """Returns a label as one name of a directory, which leads nowhere else."""
    return re.sub(r"[^\w.-]+", "-", label).lstrip(".-") or "branch"


def is_inside(path: str) -> bool:
    """Tells whether a path stays below the directory that it is joined to."""
    return not path.startswith("/") and ".." not in PurePosixPath(path).parts


def _replace(path: Path, content: bytes, mode: int = 0o644) -> None:
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_bytes(content)
    scratch.chmod(mode)
    scratch.replace(path)
