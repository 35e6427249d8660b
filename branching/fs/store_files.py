"""Files of a BranchFS store, opened without following a symbolic link.

A store may be part of a repository or an archive of another user, who can put anything into it.
These are refused: a symbolic link in any component of the path, a FIFO or device instead of a
regular file, and a file with other hard links, which may belong to something outside of the store.
BranchFS applies the same rules to its own files. Paths are those that the daemon reports, or are
below a directory whose symbolic links have been resolved.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from branching._linux.flock import has_holder
from branching._linux.syscalls import openat2

KEPT = "kept"
"""An empty file in the directory `logs`, which keeps a store that has nothing else."""
_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_file(path: Path | str, flags: int = os.O_RDONLY, *, directory: int | None = None) -> int:
    """Opens a regular file with a single hard link.

    Args:
        path: The file. A relative path is resolved in `directory`.
        flags: As for `os.open`. O_CREAT creates the file with mode 0600.
        directory: A descriptor of the directory for relative paths.

    Returns:
        The descriptor.

    Raises:
        OSError: ELOOP for a symbolic link, EPERM for anything else that is not a regular file with
            a single hard link; other errors of open.
    """
    mode = 0o600 if flags & os.O_CREAT else 0
    try:
        file = openat2(directory, path, flags | _SAFE, mode=mode)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a FIFO that nothing reads
            raise _refused(path, "not a regular file") from error
        raise
    try:
        _check(file, path)
    except BaseException:
        os.close(file)
        raise
    return file


def read(path: Path | str, *, directory: int | None = None) -> bytes:
    """Returns the content of a file. Raises OSError as `open_file` does."""
    with os.fdopen(open_file(path, directory=directory), "rb") as file:
        return file.read()


def open_directory(path: Path) -> int:
    """Opens a directory. Raises OSError (ELOOP, ENOTDIR) if a component is a symbolic link."""
    return openat2(None, path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def check_plain(path: Path) -> None:
    """Checks that a path is a regular file with a single hard link, before a library opens it.

    The library may be SQLite in this process. Closing a descriptor releases all POSIX locks that
    the process holds on the file, unless the descriptor was opened with O_PATH, as here.

    Raises:
        OSError: As `open_file`; ENOENT if there is no such file.
    """
    file = openat2(None, path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check(file, path)
    finally:
        os.close(file)


def _check(file: int, path: Path | str) -> None:
    found = os.fstat(file)
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise _refused(path, "not a regular file")
    if found.st_nlink > 1:
        raise _refused(path, "it has other hard links")


def is_locked(path: Path) -> bool:
    """Returns whether a process holds an exclusive lock on a file. OSError as `open_file`."""
    file = open_file(path)
    try:
        return has_holder(file)
    finally:
        os.close(file)


def is_name(text: str) -> bool:
    """Returns whether a text from a store's file is a single file name."""
    return text not in ("", ".", "..") and "/" not in text and "\0" not in text


def _refused(path: Path | str, why: str) -> OSError:
    hint = "remove it: BranchFS does not create it there"
    return OSError(errno.EPERM, f"refused, {why}; {hint}", str(path))
