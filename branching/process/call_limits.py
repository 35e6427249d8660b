"""The limits of a call: those of each branch, and those of all branches together.

CallLimits are open for the duration of a call. Opening them tries every limit once, so that a limit
that cannot be enforced raises an error before anything runs. Each command then gets its own scope:

    group                 the whole call, if it needs a control group
    ├── branch-5f3e       a command
    └── branch-77aa

Control groups do not limit disk space: the code that creates the branches applies `disk_each` and
`disk_together`. `process_result.ended_by` determines which limit caused the end of a command.
"""

from __future__ import annotations

from branching.process.cgroup import Cgroup
from branching.process.limits import ResourceLimits

_NONE = ResourceLimits()


class CallLimits:
    """The limits of a call. Call `open()` first, and `close()` after its last process ended.

    Args:
        each: Limits of each branch.
        together: Limits of all branches together.
    """

    def __init__(self, each: ResourceLimits | None, together: ResourceLimits | None) -> None:
        self._each = each or _NONE
        self._together = together or _NONE
        self._group: Cgroup | None = None

    @property
    def limits(self) -> ResourceLimits:
        """Limits of each branch."""
        return self._each

    @property
    def group(self) -> Cgroup | None:
        """The control group of the whole call; None if it is not open or needs none."""
        return self._group

    @property
    def disk_each(self) -> int | None:
        """Bytes that each branch may add; None for no limit."""
        return self._each.disk

    @property
    def disk_together(self) -> int | None:
        """Bytes that all branches together may add; None for no limit."""
        return self._together.disk

    @property
    def wall_seconds(self) -> float | None:
        """Seconds that each command or function may run; None for no limit."""
        return _shorter(self._each.wall_time, self._together.wall_time)

    def open(self) -> None:
        """Creates the control group of the call, and checks that every limit can be enforced.

        Raises:
            ProcessBranchError: A limit cannot be enforced; the message names it.
        """
        if not (self._each.needs_cgroup or self._together.needs_cgroup):
            return
        self._group = Cgroup.create(self._together, below=self._each)
        try:
            Cgroup.create(self._each, parent=self._group).remove()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kills the remaining processes of the call. A second call does nothing."""
        if self._group is not None:
            self._group.remove()
            self._group = None

    def scope(self) -> Cgroup | None:
        """Creates the control group of one command.

        Returns:
            The group, which the caller must remove; None if no limit needs one.
        """
        return None if self._group is None else Cgroup.create(self._each, parent=self._group)


def _shorter(one: float | None, other: float | None) -> float | None:
    known = [seconds for seconds in (one, other) if seconds is not None]
    return min(known, default=None)
