"""Control groups: the kernel's own limits on a branch's processes, v2 and v1.

    Scope.create(limits)   scope.add(pid)   (the child runs)   scope.usage()   scope.remove()

`scope` is the face. Under it `unified` (cgroup v2) and `legacy` (v1) know the control files,
`place` finds out where we may make groups, `systemd` asks for such a place where we have none,
and `directory` is one group's directory, held open.

Two rules hold everywhere. Nothing is limited in pretence: what cannot be enforced is an error
before anything runs. And groups are made below our own group only (or in the scope systemd gives
us), so that whatever limits us, a container's `--memory` say, goes on limiting the branches.

Descriptors of groups may write where no path does (see `writable`): a child that is to be held by
its limits must not inherit them. They are close-on-exec; code that forks without exec closes them.
"""

from __future__ import annotations

from branching.process.cgroup.group import Usage
from branching.process.cgroup.scope import Scope

__all__ = ["Scope", "Usage"]
