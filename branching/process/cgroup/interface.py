"""What a control group can do, whichever version of the interface it has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from branching.errors import ProcessBranchError
from branching.process.limits import ResourceLimits

CONTROLLER_OF = {
    "memory": "memory",
    "memory_high": "memory",
    "oom_group": "memory",
    "cpu": "cpu",
    "pids": "pids",
}
"""Which of the kernel's controllers enforces which limit."""

HOW_TO_ALLOW = (
    "run as root, in a container with --cap-add SYS_ADMIN, or as a user whose systemd delegates "
    "control groups; or leave the limit out"
)


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What the processes of a group, and of the groups below it, have used so far."""

    memory_peak: int | None
    """Bytes of memory at the highest; None where the kernel does not keep it (v2 before 5.19)."""
    cpu_seconds: float | None
    """CPU seconds, user and system; None where they are not counted."""
    oom_kills: int
    """Processes that the kernel killed for want of memory."""
    forks_refused: int
    """How often the limit on processes was met."""


class Group(Protocol):
    """One control group. OSError names the file that did not do as it was told."""

    @property
    def path(self) -> Path:
        """Where it is, for messages."""

    @property
    def descriptor(self) -> int | None:
        """What clone3(CLONE_INTO_CGROUP) takes; None for version 1."""

    def make_child(
        self, name: str, limits: ResourceLimits, below: ResourceLimits | None = None
    ) -> Group:
        """Makes a group below this one that enforces `limits`; leaves none if it cannot. Those
        made below it may have the limits `below`.
        """

    def add(self, pid: int) -> None:
        """Moves a process into the group, with all its threads."""

    def processes(self) -> list[int]:
        """Returns the processes in the group and in those below it."""

    def usage(self) -> Usage:
        """Returns what they have used."""

    def kill(self) -> None:
        """Sends SIGKILL to all of them, also to those that are being forked meanwhile."""

    def remove(self) -> None:
        """Removes the group, once its last process is gone, and closes it."""

    def close(self) -> None:
        """Lets go of the group without removing it."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A control file that carries a limit, and what to write there."""

    limit: str
    file: str
    value: str


def controllers_for(limits: ResourceLimits) -> dict[str, str]:
    """Returns the controllers that these limits need, each with a limit that needs it."""
    needed: dict[str, str] = {}
    for limit, controller in CONTROLLER_OF.items():
        if getattr(limits, limit) not in (None, False):
            needed.setdefault(controller, limit)
    return needed


def cannot_limit(limit: str, why: str, hint: str = HOW_TO_ALLOW) -> ProcessBranchError:
    """Returns the error for a limit that would not hold."""
    return ProcessBranchError(
        f"the limit on {limit} cannot be enforced: {why}; nothing was started",
        hint=hint,
        limit=limit,
    )


def microseconds(cpu: float) -> tuple[int, int]:
    """Returns quota and period of the CPU's bandwidth control. The kernel takes no quota below
    1 ms and no period above 1 s; small shares need the longer one.
    """
    period = 100_000 if cpu >= 0.01 else 1_000_000
    return round(cpu * period), period
