"""Where our own control groups are, read from /proc/self/cgroup and /proc/self/mountinfo.

The first file names our group in each hierarchy as the hierarchy counts, the second says which
part of a hierarchy is mounted where:

    4:memory:/docker/77aa       and     /docker/77aa  /sys/fs/cgroup/memory  ro  cgroup  memory

So our own group is the mount point there. In a control group namespace both paths are "/".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from branching._linux.mountinfo import Mount, read_table
from branching.process.cgroup.cgroup_dir import CgroupDir
from branching.process.cgroup.remount import open_writable

UNIFIED = ""
"""Stands for version 2 where a controller of version 1 has its name."""


@dataclass(frozen=True, kw_only=True)
class OwnCgroup:
    """Our own group in one hierarchy."""

    mount_point: Path
    path: Path
    is_read_only: bool
    is_namespace_root: bool
    """It is all there is to see: the root of a control group namespace, or the true root."""

    def open(self) -> CgroupDir:
        """Opens it for writing. OSError where that is not allowed."""
        return self.open_at(self.path)

    def open_parent(self) -> CgroupDir:
        """Opens the group above it for writing."""
        return self.open_at(self.path.parent)

    def open_at(self, path: Path) -> CgroupDir:
        if self.is_read_only:
            return CgroupDir(open_writable(self.mount_point, path), path)
        return CgroupDir.open(path)


def find_own() -> dict[str, OwnCgroup]:
    """Returns our own group for each controller of version 1, and for version 2 as UNIFIED.

    What is not mounted, or mounted so that our group is out of sight, is missing.
    """
    return read_own(Path("/proc/self/cgroup").read_text(errors="surrogateescape"), read_table())


def read_own(memberships: str, mounts: Iterable[Mount]) -> dict[str, OwnCgroup]:
    """Does the same for the text of /proc/self/cgroup and these mounts, which must exist."""
    named: dict[str, str] = {}
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        named.update(dict.fromkeys(controllers.split(","), path))
    found: dict[str, OwnCgroup] = {}
    for mount in mounts:
        if mount.fstype not in ("cgroup", "cgroup2"):
            continue
        is_unified = mount.fstype == "cgroup2"
        for controller in [UNIFIED] if is_unified else mount.super_options.split(","):
            own = _locate(mount, named.get(controller))
            # Of two mounts of one hierarchy the writable one serves better.
            if own is not None and (controller not in found or found[controller].is_read_only):
                found[controller] = own
    return found


def _locate(mount: Mount, group: str | None) -> OwnCgroup | None:
    if group is None or not PurePosixPath(group).is_relative_to(mount.root):
        return None
    path = mount.directory / PurePosixPath(group).relative_to(mount.root)
    if not (path / "cgroup.procs").exists():
        return None
    return OwnCgroup(
        mount_point=mount.directory,
        path=path,
        is_read_only=mount.is_read_only,
        is_namespace_root=group == "/",
    )
