"""Changes the mount table of a sandbox, and finds what is mounted where in it.

`branching._linux.mountinfo` reads the table. This one is a copy that belongs to one sandbox alone.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator

from branching._linux import syscalls
from branching._linux.mountinfo import MOUNT_TABLE, Mount, parse

_FLAGS = {
    "nosuid": syscalls.MS_NOSUID,
    "nodev": syscalls.MS_NODEV,
    "noexec": syscalls.MS_NOEXEC,
    "noatime": os.ST_NOATIME,
    "nodiratime": os.ST_NODIRATIME,
    "relatime": os.ST_RELATIME,
}
_SOURCES = ("branchfs", "branchfs-branch")
_OUT_OF_REACH = (errno.EINVAL, errno.ENOENT, errno.EACCES, errno.ENOTCONN, errno.ENOTDIR)
"""What a mount that lies hidden under another, or whose server is dead, answers."""


def has_branches(mount: Mount) -> bool:
    """Whether it is a BranchFS, an overlayfs mount of one of its branches, or a DaxFS branch."""
    is_daxfs = mount.fstype == "daxfs" and "branch=/main/" in mount.super_options
    return is_branchfs(mount) or is_daxfs or mount.source in _SOURCES


def is_branchfs(mount: Mount) -> bool:
    """Whether a BranchFS daemon serves it; its source is the base directory then."""
    return mount.fstype == "fuse.branchfs"


def answers(mount: Mount) -> bool:
    """Whether it is the root of a BranchFS, whose attributes are the daemon's answers.

    All other directories may have the same attributes, set by their owners.
    """
    return is_branchfs(mount) and mount.root == "/"


def rooted_at(directory: str) -> Mount | None:
    """Returns the mount whose mount point is `directory`, if it is one.

    It reads the table up to that mount: the mounts of branches, which may be hundreds, come after
    that of their workspace.
    """
    descriptor = os.open(directory, os.O_PATH | os.O_CLOEXEC)
    try:
        number = b"%d " % id_of(descriptor)
    finally:
        os.close(descriptor)
    with MOUNT_TABLE.open("rb") as table:
        for line in table:
            if line.startswith(number):
                mount = parse(line)
                return mount if mount.point == directory else None
    return None


def id_of(descriptor: int) -> int:
    """Returns the id of the mount in which a descriptor's file lies."""
    with open(f"/proc/self/fdinfo/{descriptor}", "rb") as facts:
        return int(next(line for line in facts if line.startswith(b"mnt_id:")).split()[1])


def take_own() -> None:
    """Gives this process a table of its own: a copy of the one that it had, with changes going
    neither way.
    """
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)


def outermost(mounts: Iterable[Mount]) -> list[Mount]:
    """Returns the mounts whose mount points lie below no other's."""
    found: list[Mount] = []
    for mount in sorted(mounts, key=lambda mount: len(mount.point)):
        above = (other.point for other in found if other.point != mount.point)
        if not any(is_beneath(mount.point, point) for point in above):
            found.append(mount)
    return found


def make_read_only(mounts: list[Mount]) -> None:
    """Makes all that is mounted read-only, file system by file system."""
    for mount in mounts:
        if mount.is_read_only:
            continue
        flags = syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY
        flags |= sum(_FLAGS.get(option, 0) for option in mount.options)
        try:
            syscalls.mount(None, mount.point, None, flags)
        except OSError as error:
            if error.errno not in _OUT_OF_REACH:
                raise


def places_of(path: str, mounts: list[Mount]) -> Iterator[str]:
    """Lists where else `path` can be reached: a file system may be mounted more than once."""
    own = around(path, mounts)
    within = _join(own.root, _below(path, own.point))
    yield path
    for mount in mounts:
        if mount.device != own.device:
            continue
        if is_beneath(within, mount.root):
            place = _join(mount.point, _below(within, mount.root))
            if place != path and os.path.lexists(place):
                yield place
        elif is_beneath(mount.root, within):
            yield mount.point


def around(path: str, mounts: list[Mount]) -> Mount:
    """Returns the mount that `path` lies in."""
    found = mounts[0]
    for mount in mounts:  # of two at one place the younger one is seen
        if is_beneath(path, mount.point) and len(mount.point) >= len(found.point):
            found = mount
    return found


def _join(directory: str, relative: str) -> str:
    return f"{directory.rstrip('/')}/{relative}".rstrip("/") or "/"


def _below(path: str, directory: str) -> str:
    """The way from a directory to a path that lies in it."""
    return path[len(directory) :].strip("/")


def is_beneath(path: str, directory: str) -> bool:
    """Whether a path is the directory's or lies below it."""
    return directory in ("/", path) or path.startswith(f"{directory}/")
