"""The mount table, read with real mounts in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from branching._linux import syscalls
from branching._linux.mountinfo import read_mounts, read_table


@pytest.mark.parametrize(
    "name", ["a b", "a\tb", "a\nb", "a\\b", "a\rb", "a\x0cb", "a\udcffb", "- b"]
)
def test_a_mount_point_may_have_any_name(tmp_path: Path, name: str) -> None:
    """The kernel escapes spaces, tabs, newlines and backslashes, and nothing else."""
    point = tmp_path / name
    point.mkdir()
    syscalls.mount("tmpfs", str(point), "tmpfs")
    try:
        (mount,) = (each for each in read_mounts() if each.directory == point)
        assert (mount.fstype, mount.root, mount.is_read_only) == ("tmpfs", "/", False)
        assert mount in read_table()
    finally:
        syscalls.unmount(str(point))
