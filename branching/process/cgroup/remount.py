"""Write access to control groups that are mounted read-only, for nobody but us.

Docker mounts a container's own groups read-only, yet with CAP_SYS_ADMIN (which FUSE needs anyway)
they can be had writable. Remounting them for all to see would let each process of the container's
root change its limits. So a thread takes a copy of the mount table for itself alone, remounts
there, opens the directory, and ends: its table goes, while the descriptor goes on leading through
the writable mount. No path does.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from pathlib import Path

_CLONE_NEWNS = 0x00020000
_MS_REMOUNT = 0x20
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 1 << 18
_KEPT_FLAGS = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_RELATIME
"""A bind remount sets all flags anew. The kernel gives the same bits to mount as statvfs shows."""


def open_writable(mount_point: Path, directory: Path) -> int:
    """Opens a directory of a read-only mount so that it can be written through the descriptor.

    OSError (EPERM) without the capability SYS_ADMIN.
    """
    opened: list[int] = []
    failures: list[OSError] = []

    def work() -> None:
        try:
            _call("unshare", _CLONE_NEWNS)  # this thread's own from here on
            _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
            point = os.fsencode(mount_point)
            flags = os.statvfs(mount_point).f_flag & _KEPT_FLAGS
            _call("mount", None, point, None, _MS_REMOUNT | _MS_BIND | flags, None)
            opened.append(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=work, name="writable cgroup")
    started(thread)
    thread.join()
    if failures:
        raise failures[0]
    return opened[0]


def started(thread: threading.Thread) -> None:
    """Starts a thread. OSError (EAGAIN) where there can be no more: Python's own is a RuntimeError,
    which says the same as a mistake of the program would.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, f"{error}") from error


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
