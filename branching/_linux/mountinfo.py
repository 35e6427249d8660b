"""Reads the mount table of this process, /proc/self/mountinfo (proc_pid_mountinfo(5)).

The table is read for each query and never cached, because mounts change at any time. Only
`mounts_around` accesses a mounted filesystem, so a dead mount blocks nothing else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

MOUNT_TABLE = Path("/proc/self/mountinfo")
LINES_CACHED_MAX = 4096
"""Of parsed lines: from one reading to the next hardly any changes."""

_OCTAL = rb"\\([0-7]{3})"


class Mount(NamedTuple):
    """One line of the table, without its ids, which differ between copies of a table."""

    point: str
    fstype: str
    source: str
    device: str = ""
    """The filesystem, as major:minor."""
    root: str = "/"
    """Which directory of the filesystem is mounted."""
    options: frozenset[str] = frozenset()
    """Of the mount: ro, nosuid, relatime, …"""
    super_options: str = ""
    """Of the filesystem, as it wrote them."""

    @property
    def directory(self) -> Path:
        """The mount point."""
        return Path(self.point)

    @property
    def is_read_only(self) -> bool:
        """Whether the mount is read-only; the filesystem may be so besides."""
        return "ro" in self.options


def read_table() -> list[Mount]:
    """Returns all mounts, the oldest first, with those that others hide."""
    return [parse(line) for line in MOUNT_TABLE.read_bytes().split(b"\n") if line]


def read_mounts() -> list[Mount]:
    """Returns the visible mounts: of several at one mount point the youngest."""
    visible: dict[str, Mount] = {}
    for mount in read_table():
        visible.pop(mount.point, None)
        visible[mount.point] = mount
    return list(visible.values())


def mounts_around(path: Path, mounts: Sequence[Mount] | None = None) -> list[Mount]:
    """Returns the mounts that `path` lies in, the deepest first. `path` need not exist.

    Args:
        path: The path.
        mounts: The visible mounts. Default: those of the table as it is now.
    """
    # realpath needs no permission beyond the path's own and swallows a dead mount's ENOTCONN.
    return _around(os.path.realpath(path), mounts)


def mounts_named(path: Path, mounts: Sequence[Mount] | None = None) -> list[Mount]:
    """Does the same by the text of an absolute path alone: nothing is looked up."""
    return _around(os.path.abspath(path), mounts)  # noqa: PTH100  (`absolute` leaves `..`)


def parse(line: bytes) -> Mount:
    """Parses one line: `36 35 98:0 /root /point rw [optional …] - fstype source super-options`."""
    return _parse(line.split(b" ", 2)[2].rstrip(b"\n"))


def ids(table: int, wanted: Callable[[Mount], bool] | None = None) -> set[int]:
    """Returns the ids of the mounts that an open mount table has now, or of those wanted."""
    os.lseek(table, 0, os.SEEK_SET)
    with open(table, "rb", closefd=False) as lines:
        return {
            int(line.split(b" ", 1)[0]) for line in lines if wanted is None or wanted(parse(line))
        }


def _around(path: str, mounts: Sequence[Mount] | None) -> list[Mount]:
    place = Path(path)
    visible = read_mounts() if mounts is None else mounts
    around = [mount for mount in visible if place.is_relative_to(mount.point)]
    return sorted(around, key=lambda mount: len(mount.directory.parts), reverse=True)


@lru_cache(maxsize=LINES_CACHED_MAX)
def _parse(line: bytes) -> Mount:
    fields, _, tail = line.partition(b" - ")
    device, root, point, options = fields.split(b" ")[:4]
    fstype, source, super_options = tail.split(b" ", 2)
    return Mount(
        device=device.decode(),
        root=_text(root),
        point=_text(point),
        options=frozenset(options.decode().split(",")),
        fstype=_text(fstype),
        source=_text(source),
        super_options=_text(super_options),
    )


def _text(field: bytes) -> str:
    # The kernel writes space, tab, newline and backslash as three octal digits.
    if b"\\" in field:
        field = re.sub(_OCTAL, lambda octal: bytes([int(octal[1], 8)]), field)
    return os.fsdecode(field)
