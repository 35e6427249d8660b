"""Copies paths from one tree to another: content, type, mode, owner, times, attributes.

For merges and rewinds of a part of a branch. A whole branch is committed, which moves its files.
Hard links among the copied paths are preserved; holes are filled. No other process changes the
trees meanwhile: the source is frozen, and the target is not visible to others. So a path cannot be
replaced by a symbolic link during the copy.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

_CHUNK_BYTES = 1 << 20


class TreeCopier:
    """From one tree into another. Each call raises OSError."""

    def __init__(self, source: Path, target: Path) -> None:
        self._source = source
        self._target = target
        self._copies: dict[int, Path] = {}
        """The path of each copied file, by the inode number in the source."""

    def clear(self, path: str) -> None:
        """Removes a path from the target if it is missing in the source or has another type there.

        A directory is removed only if it is empty. All paths are cleared before the copy, children
        before their directories.
        """
        there, here = _lstat(self._source / path), _lstat(self._target / path)
        if here is not None and (there is None or _kind(there) != _kind(here)):
            _remove(self._target / path, here)

    def make(self, path: str) -> None:
        """Makes it what it is in the source; below a directory nothing changes."""
        self.clear(path)
        there, here = self._source / path, self._target / path
        wanted, found = _lstat(there), _lstat(here)
        if wanted is None:
            return
        if stat.S_ISDIR(wanted.st_mode):
            if found is None:
                here.mkdir(parents=True)
        else:
            here.parent.mkdir(parents=True, exist_ok=True)
            if found is not None:
                here.unlink()  # one that may not be written to is replaced all the same
            self._copy(there, here, wanted)
        os.chown(here, wanted.st_uid, wanted.st_gid, follow_symlinks=False)
        shutil.copystat(there, here, follow_symlinks=False)

    def _copy(self, there: Path, here: Path, wanted: os.stat_result) -> None:
        if stat.S_ISLNK(wanted.st_mode):
            here.symlink_to(there.readlink())
        elif not stat.S_ISREG(wanted.st_mode):
            os.mknod(here, wanted.st_mode, wanted.st_rdev)
        elif wanted.st_ino in self._copies:
            here.hardlink_to(self._copies[wanted.st_ino])
        else:
            # Not shutil.copyfile: a file has one inode number in all branches, which it compares.
            with there.open("rb") as source, here.open("xb") as target:
                shutil.copyfileobj(source, target, _CHUNK_BYTES)
            if wanted.st_nlink > 1:
                self._copies[wanted.st_ino] = here


def _remove(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISDIR(found.st_mode):
        path.unlink()
        return
    try:
        path.rmdir()
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise  # the directory is not empty: it stays


def _kind(found: os.stat_result) -> int:
    return stat.S_IFMT(found.st_mode)


def _lstat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
