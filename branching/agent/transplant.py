"""One path made in one tree what it is in another: content, type, mode, owner, times, attributes.

For merges and rewinds that take a part of a branch; a whole branch is committed, which moves its
files instead of copying them. Hard links become files of their own, holes are filled. Both trees
are ours alone meanwhile: one is frozen, the other nobody knows yet. So no name can be swapped.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

_CHUNK_BYTES = 1 << 20


def transplant(source: Path, target: Path, path: str, *, removes_only: bool = False) -> None:
    """Makes `path` below `target` what it is below `source`; below a directory nothing changes.

    What is not there goes, a directory only if it is empty. With `removes_only` nothing else is
    done. Raises OSError.
    """
    there, here = source / path, target / path
    wanted, found = _lstat(there), _lstat(here)
    if found is not None and (wanted is None or _kind(wanted) != _kind(found)):
        _remove(here, found)
        found = _lstat(here)
    if wanted is None or removes_only:
        return
    if stat.S_ISDIR(wanted.st_mode):
        if found is None:
            here.mkdir(parents=True)
    else:
        here.parent.mkdir(parents=True, exist_ok=True)
        _make(there, here, wanted, found)
    os.chown(here, wanted.st_uid, wanted.st_gid, follow_symlinks=False)
    shutil.copystat(there, here, follow_symlinks=False)


def _make(there: Path, here: Path, wanted: os.stat_result, found: os.stat_result | None) -> None:
    if found is not None:
        here.unlink()  # one that may not be written to is replaced all the same
    if stat.S_ISREG(wanted.st_mode):
        # Not shutil.copyfile: a file has one inode number in all branches, and it compares those.
        with there.open("rb") as source, here.open("xb") as target:
            shutil.copyfileobj(source, target, _CHUNK_BYTES)
    elif stat.S_ISLNK(wanted.st_mode):
        here.symlink_to(there.readlink())
    else:
        os.mknod(here, wanted.st_mode, wanted.st_rdev)


def _remove(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISDIR(found.st_mode):
        path.unlink()
        return
    try:
        path.rmdir()
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise  # what is in it stays, and so does the directory


def _kind(found: os.stat_result) -> int:
    return stat.S_IFMT(found.st_mode)


def _lstat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
