"""Limits as a process meets them: the control group it is put in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from branching.process.cgroup import Cgroup
from branching.process.cgroup.cgroup_dir import CgroupDir
from branching.process.cgroup.interface import cannot_limit
from branching.process.cgroup.v2 import V2Group
from branching.process.limits import ResourceLimits


def cgroup_for(limits: ResourceLimits | None, group: Any = None) -> Cgroup | None:
    """Makes the scope that enforces the limits, below `group`; None where none is needed.

    `group` is a Cgroup, or the directory of a control group (version 2). Raises ProcessBranchError
    for a limit that cannot be enforced.
    """
    limits = limits or ResourceLimits()
    if limits.disk is not None:
        raise cannot_limit(
            "disk",
            "this version has no quota on a branch's layer",
            "leave the limit on disk out",
        )
    if group is None:
        return Cgroup.create(limits) if limits.needs_cgroup else None
    if not isinstance(group, Cgroup):
        group = Cgroup(V2Group(CgroupDir.open(Path(group))))
    return Cgroup.create(limits, parent=group)
