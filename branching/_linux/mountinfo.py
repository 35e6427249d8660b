"""What is mounted where, as this process sees it.

The kernel's table (`/proc/self/mountinfo`) is read afresh for each question: mounts come and go,
and reading it costs less than being wrong. Nothing but `mounts_around` touches a mounted file
system, so a dead mount cannot hang us.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

MOUNT_TABLE = Path("/proc/self/mountinfo")

_OCTAL = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One mounted file system: where it is seen, its type, and what it says it was made from."""

    point: Path
    fstype: str
    source: str
    root: str = "/"
    """Which directory of the file system is seen there."""


def read_mounts() -> list[Mount]:
    """Lists the visible mounts; one that hides an older one at the same place stands for it."""
    visible: dict[Path, Mount] = {}
    for line in MOUNT_TABLE.read_bytes().splitlines():
        mount = _parse(line)
        visible.pop(mount.point, None)
        visible[mount.point] = mount
    return list(visible.values())


def mounts_around(path: Path) -> list[Mount]:
    """Lists the mounts that `path` lies in, the deepest first. `path` need not exist."""
    # realpath needs no permission beyond the path's own and swallows a dead mount's ENOTCONN.
    return _around(os.path.realpath(path))


def mounts_named(path: Path) -> list[Mount]:
    """Does the same by the path's names alone: no symbolic link is followed, no file system is
    asked."""
    return _around(os.path.abspath(path))  # noqa: PTH100  (`absolute` leaves `..`)


def _around(path: str) -> list[Mount]:
    place = Path(path)
    around = [mount for mount in read_mounts() if place.is_relative_to(mount.point)]
    return sorted(around, key=lambda mount: len(mount.point.parts), reverse=True)


def _parse(line: bytes) -> Mount:
    # 36 35 98:0 /root /point rw,noatime [optional fields] - fstype source options
    fields, _, tail = line.partition(b" - ")
    fstype, source = tail.split(b" ")[:2]
    root, point = fields.split(b" ")[3:5]
    return Mount(
        point=Path(_text(point)), fstype=_text(fstype), source=_text(source), root=_text(root)
    )


def _text(field: bytes) -> str:
    # The kernel writes space, tab, newline and backslash as three octal digits.
    return os.fsdecode(_OCTAL.sub(lambda octal: bytes([int(octal[1], 8)]), field))
