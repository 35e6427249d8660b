"""How a process ended: as it is told to users, and as the two kinds of process tell it."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from branching._exit_codes import EXIT_SIGNAL_BASE

REAP_SECONDS_MAX = 10.0
"""SIGKILL works at once unless the kernel itself is stuck; then waiting longer does not help."""

How = Literal["exit", "signal", "oom", "timeout", "disk", "pids", "cancelled", "error"]
"""What ended a process.

exit        itself, with an exit code
signal      a signal that was not ours
oom         it, or a process of its, was killed for want of memory
timeout     its time was over
disk        it failed, having met its limit on disk space
pids        it failed, having met its limit on processes
cancelled   we did: a lost race, an abort, an interrupt
error       it could not be started, or a file that it must not read could not be kept hidden
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
        """It ended by itself, with exit code 0."""
        return self.how == "exit" and self.exit_code == 0


@dataclass(frozen=True, kw_only=True)
class ExitStatus:
    """What the operating system says of an end."""

    returncode: int
    """As Python counts: the exit code, or a signal's number below zero."""
    cpu_seconds: float | None = None
    memory_peak: int | None = None
    timed_out: bool = False
    is_uncovered: bool = False
    """It was killed because the cover of a hidden file was gone."""
    oom_kills: int = 0
    """Of its processes, killed for want of memory."""
    forks_refused: int = 0

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

    def told(self, *, is_cancelled: bool, wall_seconds: float, score: str = "") -> Ended:
        """Tells it to users."""
        how: How = "exit" if self.returncode >= 0 else "signal"
        reason = self.reason
        if self.is_uncovered:
            how, reason = "error", "killed: a hidden file was no longer hidden"
        elif is_cancelled:
            # What took our SIGTERM as a wish and exited in order was cancelled all the same.
            how = "cancelled"
        elif self.timed_out:
            how, reason = "timeout", f"its time was over ({reason})"
        elif self.returncode != 0 and self.oom_kills:
            how, reason = "oom", f"out of memory ({reason})"
        elif self.returncode != 0 and self.forks_refused:
            how, reason = "pids", f"too many processes ({reason})"
        return Ended(
            exit_code=self.exit_code,
            how=how,
            reason=reason,
            score=score,
            memory_peak=self.memory_peak,
            cpu_seconds=self.cpu_seconds,
            wall_seconds=wall_seconds,
            oom_kills=self.oom_kills,
        )
