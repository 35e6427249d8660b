"""Files of a BranchFS store, opened without following a symbolic link.

A store may have come with a directory of somebody else (a repository, an archive), and its owner
may put anything into it. So no component of a path may be a symbolic link, a FIFO or a device is
refused instead of waited for, and so is a file that has other hard links: its content may belong to
something outside. BranchFS applies the same rule to its own files. Paths are those of a store as
its daemon reports it, or below a directory that was resolved.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from branching._linux.syscalls import openat2

_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_file(path: Path | str, flags: int = os.O_RDONLY, *, directory: int | None = None) -> int:
    """Opens a regular file that has one name; O_CREAT makes it for its owner alone.

    A relative path is one in `directory`. OSError names the path: ELOOP for a symbolic link, EPERM
    for anything else that is not such a file.
    """
    mode = 0o600 if flags & os.O_CREAT else 0
    try:
        file = openat2(directory, path, flags | _SAFE, mode=mode)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a FIFO that nothing reads
            raise _refused(path, "not a regular file") from error
        raise
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise _refused(path, "not a regular file")
        if found.st_nlink > 1:
            raise _refused(path, "it has other hard links")
    except BaseException:
        os.close(file)
        raise
    return file


def read(path: Path | str, *, directory: int | None = None) -> bytes:
    """Returns the content of a file. OSError as from `open_file`."""
    with os.fdopen(open_file(path, directory=directory), "rb") as file:
        return file.read()


def open_directory(path: Path) -> int:
    """Opens a directory. OSError: ELOOP or ENOTDIR where a link is in its place or on the way."""
    return openat2(None, path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def check_plain(path: Path) -> None:
    """Refuses anything but a regular file that has one name, for programs that open it by path
    themselves. OSError as from `open_file`, also where there is none."""
    os.close(open_file(path))


def is_name(text: str) -> bool:
    """Whether a text read from a file of a store is one name in a directory, and nothing else."""
    return text not in ("", ".", "..") and "/" not in text and "\0" not in text


def _refused(path: Path | str, why: str) -> OSError:
    hint = "remove it: BranchFS does not create it there"
    return OSError(errno.EPERM, f"refused, {why}; {hint}", str(path))
