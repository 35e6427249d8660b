"""Finds the cgroups of this process in /proc/self/cgroup and /proc/self/mountinfo.

The first file has the path of our cgroup in each hierarchy. The second has the part of each
hierarchy that is mounted, and its mount point:

    4:memory:/docker/77aa       and     /docker/77aa  /sys/fs/cgroup/memory  ro  cgroup  memory

In this example our cgroup is the mount point. In a cgroup namespace both paths are "/".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from branching._linux.mountinfo import Mount, read_table
from branching.process.cgroup.cgroup_dir import CgroupDir
from branching.process.cgroup.remount import open_writable

UNIFIED = ""
"""Key for version 2, in place of the name of a version 1 controller."""


@dataclass(frozen=True, kw_only=True)
class OwnCgroup:
    """The cgroup of this process in one hierarchy."""

    mount_point: Path
    path: Path
    is_read_only: bool
    is_namespace_root: bool
    """Whether it is the root of a cgroup namespace, or of the whole hierarchy."""

    def open(self) -> CgroupDir:
        """Opens its directory for writing. Raises OSError if that is not allowed."""
        return self.open_at(self.path)

    def open_parent(self) -> CgroupDir:
        """Opens the parent's directory for writing."""
        return self.open_at(self.path.parent)

    def open_at(self, path: Path) -> CgroupDir:
        if self.is_read_only:
            return CgroupDir(open_writable(self.mount_point, path), path)
        return CgroupDir.open(path)


def find_own() -> dict[str, OwnCgroup]:
    """Returns our cgroup for each controller of version 1, and for version 2 as UNIFIED.

    Hierarchies that are not mounted, or whose mount does not contain our cgroup, are missing.
    """
    return read_own(Path("/proc/self/cgroup").read_text(errors="surrogateescape"), read_table())


def read_own(memberships: str, mounts: Iterable[Mount]) -> dict[str, OwnCgroup]:
    """Returns the same for a text of /proc/self/cgroup and a mount table."""
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
            # If a hierarchy is mounted twice, prefer the writable mount.
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
