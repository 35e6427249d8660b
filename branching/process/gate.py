"""Holds a program back until it is under its limits.

A process is put into a control group by its number, so it must be there already; and what it does
before that would not count. So it begins as a shell that waits for a line, and becomes the program
when that has come. When no line comes, it ends.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from branching.process.cgroup import Scope
from branching.process.owner import Owner

_WAIT = 'read -r _ <"/proc/self/fd/$0" && exec "$@"'
"""By path: `<&` has no room for numbers above 9 in every shell."""


class Gate:
    """Between the making of a process and the program in it."""

    def __init__(self, owner: Owner | None) -> None:
        self.descriptor, self._ours = os.pipe2(os.O_CLOEXEC)
        """The child must inherit it."""
        if owner is not None:
            os.fchown(self.descriptor, owner.uid, owner.gid)  # it opens the path as its own user

    def behind(self, argv: Sequence[str]) -> list[str]:
        """Returns what to start instead of `argv`."""
        return ["/bin/sh", "-c", _WAIT, str(self.descriptor), *argv]

    def open(self, pid: int, scope: Scope) -> None:
        """Puts the process into the scope and lets it go on.

        Raises ProcessBranchError when it could not be put there; it has not gone on then.
        """
        scope.add(pid)
        os.write(self._ours, b"\n")

    def close(self) -> None:
        """Gives the pipe back. A process that still waits has to be killed by whoever made it."""
        os.close(self.descriptor)
        os.close(self._ours)
