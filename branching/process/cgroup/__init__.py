"""Control groups: the kernel's own limits on a branch's processes, v2 and v1.

    Cgroup.create(limits)   cgroup.add(pid)   (the child runs)   cgroup.usage()   cgroup.remove()

`cgroup` is the interface. Below it `v2` and `v1` know the control files of the two versions,
`own_cgroup` finds out where groups may be made, `systemd` asks for such a place where there is
none, and `cgroup_dir` is the open directory of one group.

Two rules hold everywhere. Nothing is limited in pretence: what cannot be enforced is an error
before anything runs. And groups are made below our own group only (or in the scope systemd gives
us), so that whatever limits us, a container's `--memory` say, goes on limiting the branches.

Descriptors of groups may write where no path does (see `remount`): a child that is to be held by
its limits must not inherit them. They are close-on-exec; code that forks without exec closes them.
"""

from __future__ import annotations

from branching.process.cgroup.cgroup import Cgroup
from branching.process.cgroup.interface import Usage

__all__ = ["Cgroup", "Usage"]
