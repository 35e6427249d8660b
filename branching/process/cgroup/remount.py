"""Write access to cgroups that are mounted read-only, for this process only.

Docker mounts the cgroups of a container read-only. With CAP_SYS_ADMIN, which FUSE requires anyway,
they can be remounted writable. But then every root process in the container could change its
limits. So a thread creates its own mount namespace, remounts there, opens the directory, and exits.
The namespace ends with the thread, and the descriptor still refers to the writable mount.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

from branching._linux import syscalls


def open_writable(mount_point: Path, directory: Path) -> int:
    """Opens a directory of a read-only mount; files can be written relative to the descriptor.

    Args:
        mount_point: The mount point.
        directory: A directory in the mount.

    Raises:
        OSError: EPERM without CAP_SYS_ADMIN.
    """
    opened: list[int] = []
    failures: list[OSError] = []

    def work() -> None:
        try:
            syscalls.unshare(syscalls.CLONE_NEWNS)  # affects this thread only
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
    """Starts a thread.

    Raises:
        OSError: EAGAIN if no thread can be created, in place of Python's RuntimeError.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, f"{error}") from error
