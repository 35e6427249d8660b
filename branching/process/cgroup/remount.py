"""Write access to control groups that are mounted read-only, for nobody but us.

Docker mounts a container's own groups read-only, yet with CAP_SYS_ADMIN (which FUSE needs anyway)
they can be had writable. Remounting them for all to see would let each process of the container's
root change its limits. So a thread takes a copy of the mount table for itself alone, remounts
there, opens the directory, and ends: its table goes, while the descriptor goes on leading through
the writable mount. No path does.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

from branching._linux import syscalls


def open_writable(mount_point: Path, directory: Path) -> int:
    """Opens a directory of a read-only mount so that it can be written through the descriptor.

    OSError (EPERM) without the capability SYS_ADMIN.
    """
    opened: list[int] = []
    failures: list[OSError] = []

    def work() -> None:
        try:
            syscalls.unshare(syscalls.CLONE_NEWNS)  # of this thread alone
            syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
            flags = os.statvfs(mount_point).f_flag & syscalls.KEPT_FLAGS
            flags |= syscalls.MS_REMOUNT | syscalls.MS_BIND
            syscalls.mount(None, str(mount_point), None, flags)
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
