"""The mount table of this process's namespace, and what is done to all of it.

Other than `branching.fs.mounts`, which asks what is mounted where, this changes the table. It is
a copy that belongs to one sandbox alone.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from branching.process.sandbox import kernel

_ESCAPED = re.compile(rb"\\([0-7]{3})")
_FLAGS = {
    "nosuid": kernel.MS_NOSUID,
    "nodev": kernel.MS_NODEV,
    "noexec": kernel.MS_NOEXEC,
    "noatime": os.ST_NOATIME,
    "nodiratime": os.ST_NODIRATIME,
    "relatime": os.ST_RELATIME,
}
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


def read() -> list[Mount]:
    """Lists the mounts of this process, the oldest first. It reads /proc."""
    with open("/proc/self/mountinfo", "rb") as table:
        return [_parse(line) for line in table]


def make_private() -> None:
    """Cuts the table off from the one it was copied from: changes go neither way."""
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)


def make_read_only(mounts: list[Mount]) -> None:
    """Makes all that is mounted read-only, file system by file system."""
    for mount in mounts:
        if mount.is_read_only:
            continue
        flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | mount.flags
        try:
            kernel.mount(None, mount.point, None, flags)
        except OSError as error:
            if error.errno not in _OUT_OF_REACH:
                raise


def places_of(path: str, mounts: list[Mount]) -> Iterator[str]:
    """Lists where else `path` can be reached: a file system may be mounted more than once."""
    own = around(path, mounts)
    within = os.path.normpath(f"{own.root}/{os.path.relpath(path, own.point)}")
    yield path
    for mount in mounts:
        if mount.device != own.device:
            continue
        if _is_beneath(within, mount.root):
            place = os.path.normpath(f"{mount.point}/{os.path.relpath(within, mount.root)}")
            if place != path and os.path.lexists(place):
                yield place
        elif _is_beneath(mount.root, within):
            yield mount.point


def around(path: str, mounts: list[Mount]) -> Mount:
    """Returns the mount that `path` lies in."""
    found = mounts[0]
    for mount in mounts:  # of two at one place the younger one is seen
        if _is_beneath(path, mount.point) and len(mount.point) >= len(found.point):
            found = mount
    return found


def _is_beneath(path: str, directory: str) -> bool:
    return directory in ("/", path) or path.startswith(f"{directory}/")


def _parse(line: bytes) -> Mount:
    # 36 35 98:0 /root /point rw,noatime [optional fields] - fstype source options
    words = line.split(b" ")
    options = words[5].decode().split(",")
    return Mount(
        device=words[2].decode(),
        root=_text(words[3]),
        point=_text(words[4]),
        flags=sum(_FLAGS.get(option, 0) for option in options),
        is_read_only="ro" in options,
    )


def _text(word: bytes) -> str:
    return os.fsdecode(_ESCAPED.sub(lambda octal: bytes([int(octal[1], 8)]), word))
