"""Control groups: the kernel's own limits on a branch's processes, v2 and v1.

    Scope.create(limits)   scope.add(pid)   (the child runs)   scope.usage()   scope.remove()

`cgroup` is the face. Under it `v2` (cgroup v2) and `v1` (v1) know the control files,
`own_cgroup` finds out where we may make groups, `systemd` asks for such a place where we have none,
and `cgroup_dir` is one group's directory, held open.

Two rules hold everywhere. Nothing is limited in pretence: what cannot be enforced is an error
before anything runs. And groups are made below our own group only (or in the scope systemd gives
us), so that whatever limits us, a container's `--memory` say, goes on limiting the branches.

Descriptors of groups may write where no path does (see `remount`): a child that is to be held by
its limits must not inherit them. They are close-on-exec; code that forks without exec closes them.
"""

from __future__ import annotations

from branching.process.cgroup.cgroup import Scope
from branching.process.cgroup.interface import Usage

__all__ = ["Scope", "Usage"]
