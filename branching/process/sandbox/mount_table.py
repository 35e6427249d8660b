"""Finds mounts in this process's mount table, and gives the process a table of its own.

`branching._linux.mountinfo` reads the table.
"""

from __future__ import annotations

import os

from branching._linux import syscalls
from branching._linux.mountinfo import MOUNT_TABLE, Mount, parse


def answers(mount: Mount) -> bool:
    """Whether it is the root of a BranchFS, whose attributes are the daemon's answers.

    All other directories may have the same attributes, set by their owners.
    """
    return mount.fstype == "fuse.branchfs" and mount.root == "/"


def rooted_at(directory: str) -> Mount | None:
    """Returns the mount whose mount point is `directory`, if it is one."""
    mount = around(directory)
    return mount if mount is not None and mount.point == directory else None


def around(path: str) -> Mount | None:
    """Returns the mount that `path` lies in.

    It reads the table up to that mount: the mounts of branches, which may be hundreds, come after
    that of their workspace.
    """
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        with open(f"/proc/self/fdinfo/{descriptor}", "rb") as facts:
            number = next(line for line in facts if line.startswith(b"mnt_id:")).split()[1]
    finally:
        os.close(descriptor)
    with MOUNT_TABLE.open("rb") as table:
        return next((parse(line) for line in table if line.startswith(number + b" ")), None)


def take_own() -> None:
    """Gives this process a copy of its mount table. Changes of one do not reach the other."""
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
