"""The interface that cgroups of both versions implement."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from branching.errors import ProcessBranchError
from branching.process.limits import ResourceLimits

CONTROLLER_OF = {
    "memory": "memory",
    "memory_high": "memory",
    "oom_group": "memory",
    "cpu": "cpu",
    "pids": "pids",
}
"""The kernel's controller for each limit."""

HOW_TO_ALLOW = (
    "run as root, in a container with --cap-add SYS_ADMIN, or as a user whose systemd delegates "
    "control groups; or leave the limit out"
)


class Usage(NamedTuple):
    """The resource usage of a cgroup and its descendants."""

    memory_peak: int | None
    """Peak memory in bytes; None if the kernel does not count it (version 2 before Linux 5.19)."""
    cpu_seconds: float | None
    """User and system CPU time in seconds; None if it is not counted."""
    oom_kills: int
    """Number of processes killed by the out-of-memory killer."""
    forks_refused: int
    """Number of forks refused by the limit on processes."""


class Group(Protocol):
    """One cgroup. Methods raise OSError with the control file's path if a write is rejected."""

    @property
    def path(self) -> Path:
        """Its directory, for messages."""

    @property
    def descriptor(self) -> int | None:
        """A descriptor for clone3 with CLONE_INTO_CGROUP; None for version 1."""

    def make_child(
        self, name: str, limits: ResourceLimits, below: ResourceLimits | None = None
    ) -> Group:
        """Creates a child that enforces `limits`. If that fails, no cgroup is left.

        Args:
            name: Its name.
            limits: Its limits.
            below: The limits of cgroups that will be created in it.
        """

    def add(self, pid: int) -> None:
        """Moves a process with all its threads into the cgroup."""

    def processes(self) -> list[int]:
        """Returns the pids in the cgroup and its descendants."""

    def usage(self) -> Usage:
        """Returns the resource usage."""

    def kill(self) -> None:
        """Sends SIGKILL to all processes, including those forked meanwhile."""

    def remove(self) -> None:
        """Waits until the cgroup has no processes, removes it, and closes it."""

    def close(self) -> None:
        """Closes the descriptors without removing the cgroup."""


class Setting(NamedTuple):
    """The control file and value for a limit."""

    limit: str
    file: str
    value: str


def controllers_for(limits: ResourceLimits) -> dict[str, str]:
    """Returns the required controllers, each with the name of a limit that requires it."""
    needed: dict[str, str] = {}
    for limit, controller in CONTROLLER_OF.items():
        if getattr(limits, limit) not in (None, False):
            needed.setdefault(controller, limit)
    return needed


def cannot_limit(limit: str, why: str, hint: str = HOW_TO_ALLOW) -> ProcessBranchError:
    """Returns the error for a limit that cannot be enforced."""
    return ProcessBranchError(
        f"the limit on {limit} cannot be enforced: {why}; nothing was started",
        hint=hint,
        limit=limit,
    )


def microseconds(cpu: float) -> tuple[int, int]:
    """Returns the quota and period of CPU bandwidth control, in microseconds.

    The kernel requires a quota of at least 1 ms and a period of at most 1 s, so small shares use
    the longer period.

    Args:
        cpu: The limit in CPUs.
    """
    period = 100_000 if cpu >= 0.01 else 1_000_000
    return round(cpu * period), period
