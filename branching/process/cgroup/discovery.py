"""Finds the parent for new cgroups and prepares it.

version 1    our own cgroup in the hierarchy of each controller; requires root
version 2    our own cgroup if it is delegated: in a container, by systemd, or to our user;
             otherwise a new scope from systemd
"""

from __future__ import annotations

import os
from pathlib import Path

from branching.process.cgroup import systemd
from branching.process.cgroup.cgroup_dir import CgroupDir
from branching.process.cgroup.interface import Group, cannot_limit, controllers_for
from branching.process.cgroup.own_cgroup import UNIFIED, OwnCgroup, find_own
from branching.process.cgroup.v1 import KEPT_BY, V1Group
from branching.process.cgroup.v2 import LEAF, V2Group
from branching.process.limits import ResourceLimits

_cleared: set[Path] = set()
"""Directories whose leftovers this process has removed."""


def find(limits: ResourceLimits) -> Group:
    """Returns the parent for cgroups with these limits.

    Raises:
        ProcessBranchError: A limit cannot be enforced; the error names it.
        OSError: The kernel refused an operation.
    """
    needed = controllers_for(limits)
    own = find_own()
    legacy = {name: own[name] for name in KEPT_BY if name in own}
    # A controller that is mounted as version 1 is not available in version 2.
    if needed.keys() <= legacy.keys() and legacy:
        return _legacy(legacy)
    if UNIFIED in own and not needed.keys() & legacy.keys():
        return _unified(own[UNIFIED])
    controller, limit = next(iter(needed.items()), ("", "resources"))
    raise cannot_limit(
        limit,
        f"/proc/self/mountinfo shows no {controller} control group of this process",
        "mount the control groups (/sys/fs/cgroup), or leave the limit out",
    )


def _legacy(own: dict[str, OwnCgroup]) -> V1Group:
    opened: dict[OwnCgroup, CgroupDir] = {}
    try:
        for group in own.values():
            if group not in opened:
                opened[group] = group.open()
        for directory in opened.values():
            _clear(directory)
    except BaseException:
        for directory in opened.values():
            directory.close()
        raise
    return V1Group({name: opened[group] for name, group in own.items()})


def _unified(own: OwnCgroup) -> V2Group:
    if own.path.name == LEAF:  # moved here by an earlier call, or by another process
        directory = own.open_parent()
    else:
        directory = own.open()
        if not own.is_namespace_root and not _is_delegated(directory) and systemd.is_running():
            directory.close()
            systemd.enter_scope()
            directory = find_own()[UNIFIED].open()
    try:
        _clear(directory)
    except BaseException:
        directory.close()
        raise
    return V2Group(directory)


def _is_delegated(directory: CgroupDir) -> bool:
    """Returns whether systemd has delegated the cgroup."""
    for name in ("user.delegate", "trusted.delegate"):
        try:
            if os.getxattr(directory.descriptor, name) == b"1":
                return True
        except OSError:
            continue  # missing, or not readable
    return False


def _clear(directory: CgroupDir) -> None:
    if directory.path not in _cleared:
        directory.remove_leftovers()
        _cleared.add(directory.path)
