"""The mount table of this process's namespace, and what is done to all of it.

Unlike `branching._linux.mountinfo`, which reads the table, this changes it. It is
a copy that belongs to one sandbox alone.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from branching._linux import syscalls

_LINE = re.compile(rb"\d+ \d+ (\S+) (\S+) (\S+) (\S+)(?: \S+)*? - (\S+) (\S*)")
"""36 35 98:0 /root /point rw,noatime [shared:1 …] - fstype source …: what is the same in each copy
of a table."""
_ESCAPED = re.compile(rb"\\([0-7]{3})")
_FLAGS = {
    "nosuid": syscalls.MS_NOSUID,
    "nodev": syscalls.MS_NODEV,
    "noexec": syscalls.MS_NOEXEC,
    "noatime": os.ST_NOATIME,
    "nodiratime": os.ST_NODIRATIME,
    "relatime": os.ST_RELATIME,
}
_SOURCES = (b"branchfs", b"branchfs-branch")
LINES_KEPT_MAX = 4096
"""Of mount tables: from one sandbox to the next hardly any changes."""
_OUT_OF_REACH = (errno.EINVAL, errno.ENOENT, errno.EACCES, errno.ENOTCONN, errno.ENOTDIR)
"""What a mount that lies hidden under another, or whose server is dead, answers."""


@dataclass(frozen=True)
class Mount:
    """One line of the table."""

    device: str
    """The file system, as major:minor."""
    root: str
    """Which directory of the file system is mounted."""
    point: str
    flags: int
    is_read_only: bool
    has_branches: bool
    """It is a BranchFS, or a branch of one that the kernel's overlayfs presents."""
    source: str | None
    """The source of a BranchFS, which is its base directory; None for all other mounts."""

    @property
    def answers(self) -> bool:
        """It is the root of a BranchFS, whose attributes are the daemon's answers. All other
        directories may have the same attributes, set by their owners."""
        return self.source is not None and self.root == "/"


def read() -> list[Mount]:
    """Lists the mounts of this process, the oldest first. It reads /proc."""
    with open("/proc/self/mountinfo", "rb") as table:
        return [_mount(*_fields(line)) for line in table]


def rooted_at(directory: str) -> Mount | None:
    """Returns the mount whose mount point is `directory`, if it is one.

    It reads the table up to that mount: the mounts of branches, which may be hundreds, come after
    that of their workspace.
    """
    descriptor = os.open(directory, os.O_PATH | os.O_CLOEXEC)
    try:
        with open(f"/proc/self/fdinfo/{descriptor}", "rb") as facts:
            number = next(line for line in facts if line.startswith(b"mnt_id:")).split()[1]
    finally:
        os.close(descriptor)
    with open("/proc/self/mountinfo", "rb") as table:
        for line in table:
            if line.startswith(number + b" "):
                mount = _mount(*_fields(line))
                return mount if mount.point == directory else None
    return None


def ids(table: int) -> set[int]:
    """Returns the mounts that there are now in an open mount table."""
    os.lseek(table, 0, os.SEEK_SET)
    with open(table, "rb", closefd=False) as lines:
        return {int(line.split(b" ", 1)[0]) for line in lines}


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
        flags = syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY | mount.flags
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


def _fields(line: bytes) -> tuple[bytes, ...]:
    found = _LINE.match(line)
    assert found is not None, f"no line of a mount table: {line!r}"
    return found.groups()


@lru_cache(maxsize=LINES_KEPT_MAX)
def _mount(
    device: bytes, root: bytes, point: bytes, flags: bytes, fstype: bytes, source: bytes
) -> Mount:
    options = flags.decode().split(",")
    return Mount(
        device=device.decode(),
        root=_text(root),
        point=_text(point),
        flags=sum(_FLAGS.get(option, 0) for option in options),
        is_read_only="ro" in options,
        has_branches=fstype == b"fuse.branchfs" or source in _SOURCES,
        source=_text(source) if fstype == b"fuse.branchfs" else None,
    )


def _text(word: bytes) -> str:
    return os.fsdecode(_ESCAPED.sub(lambda octal: bytes([int(octal[1], 8)]), word))
