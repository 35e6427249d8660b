"""Control groups (cgroups), version 1 and 2: limits on the processes of a branch.

    Cgroup.create(limits)   cgroup.add(pid)   (the child runs)   cgroup.usage()   cgroup.remove()

`cgroup` is the interface. `v2` and `v1` have the control files of the two versions, `own_cgroup`
finds the cgroup of this process, `systemd` requests a delegated one if needed, and `cgroup_dir` is
the open directory of one cgroup.

A limit that cannot be enforced is an error before anything runs. Cgroups are created only below our
own cgroup, or in the scope from systemd. So the limits of our own cgroup, such as a container's
`--memory`, apply to the branches, too.

Descriptors of cgroups may allow writes that no path allows (see `remount`). A limited child process
must not inherit them. They are close-on-exec; code that forks without exec closes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from branching._lazy import lazy_exports

if TYPE_CHECKING:
    from branching.process.cgroup.cgroup import Cgroup
    from branching.process.cgroup.interface import Usage

__all__ = ["Cgroup", "Usage"]

__getattr__ = lazy_exports(__name__, {"Cgroup": ".cgroup", "Usage": ".interface"})
