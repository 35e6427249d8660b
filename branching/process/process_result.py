"""How a process ended: the result for users, and the results of both kinds of processes."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from branching._exit_codes import EXIT_SIGNAL_BASE

if TYPE_CHECKING:
    from branching.process.cgroup.interface import Usage

REAP_SECONDS_MAX = 10.0
"""A killed process ends within milliseconds, unless it is blocked in the kernel."""

How = Literal["exit", "signal", "oom", "timeout", "disk", "pids", "cancelled", "error"]
"""What ended a process.

exit        it exited with an exit code
signal      a signal that we did not send
oom         the kernel killed it, or one of its processes, because of its memory limit
timeout     its time limit
disk        it failed after it had reached its limit on disk space
pids        it failed after it had reached its limit on processes
cancelled   we ended it: a lost race, an abort, an interrupt
error       it could not be started, or a hidden file could not be kept hidden
"""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    exit_code: int
    """As a shell reports it."""
    how: How
    reason: str
    """The same in words: "exit 1", "killed by SIGSEGV", "no-such: not found"."""
    score: str = ""
    """What it wrote to descriptor 3, or ""."""
    memory_peak: int | None = None
    """Bytes of memory at the highest: of all its processes together where a limit was set, else
    of the largest one."""
    cpu_seconds: float | None = None
    """CPU seconds, user and system, of it and of those of its children that it waited for."""
    wall_seconds: float = 0.0
    oom_kills: int = 0
    """How many of its processes were killed for want of memory, where that is counted."""

    @property
    def success(self) -> bool:
        """Whether it exited with exit code 0."""
        return self.how == "exit" and self.exit_code == 0


class ExitStatus(NamedTuple):
    """How the operating system, or init, reports an end."""

    returncode: int
    """The exit code, or the negative number of a signal."""
    cpu_seconds: float | None = None
    memory_peak: int | None = None
    timed_out: bool = False
    """Its time limit expired before anything else ended it."""
    is_uncovered: bool = False
    """It was killed because a hidden file was no longer hidden."""

    @property
    def exit_code(self) -> int:
        """As a shell reports it."""
        return self.returncode if self.returncode >= 0 else EXIT_SIGNAL_BASE - self.returncode

    @property
    def reason(self) -> str:
        """The end in words."""
        if self.returncode >= 0:
            return f"exit {self.returncode}"
        try:
            name = signal.Signals(-self.returncode).name
        except ValueError:  # the real-time signals have no names
            name = f"signal {-self.returncode}"
        return f"killed by {name}"


def ended_by(
    status: ExitStatus,
    *,
    is_cancelled: bool,
    wall_seconds: float,
    usage: Usage | None = None,
    disk_refusals: int = 0,
    score: str = "",
    reason: str = "",
) -> Ended:
    """Determines what ended a process. The only place that does.

    Args:
        status: What the operating system reports.
        is_cancelled: Whether its end was requested before it came.
        wall_seconds: How long it ran.
        usage: Counters of its control group, if it had one.
        disk_refusals: Number of changes that the disk limit refused while it ran.
        score: What it wrote to descriptor 3.
        reason: Why it failed, where that says more than its exit code.

    Returns:
        The result for users. A limit is its cause only if the process failed.
    """
    oom_kills = usage.oom_kills if usage else 0
    has_failed = status.returncode != 0
    how: How = "exit" if status.returncode >= 0 else "signal"
    reason = reason or status.reason
    if status.is_uncovered:
        how, reason = "error", "killed: a hidden file was no longer hidden"
    elif is_cancelled:
        # A process that handled our SIGTERM and exited was cancelled, too.
        how = "cancelled"
    elif status.timed_out:
        how, reason = "timeout", f"timed out ({reason})"
    elif has_failed and oom_kills:
        how, reason = "oom", f"out of memory ({reason})"
    elif has_failed and disk_refusals:
        how, reason = "disk", f"disk limit reached ({reason})"
    elif has_failed and usage and usage.forks_refused:
        how, reason = "pids", f"too many processes ({reason})"
    peak, cpu = (usage.memory_peak, usage.cpu_seconds) if usage else (None, None)
    return Ended(
        exit_code=status.exit_code,
        how=how,
        reason=reason,
        score=score,
        memory_peak=status.memory_peak if peak is None else peak,
        cpu_seconds=status.cpu_seconds if cpu is None else cpu,
        wall_seconds=wall_seconds,
        oom_kills=oom_kills,
    )
