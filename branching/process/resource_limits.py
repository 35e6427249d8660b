"""What a branch may use at most. Pure values; who enforces which stands with each field."""

from __future__ import annotations

import math
import re
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction

CPU_MIN = 0.001
"""One millisecond a second: the kernel's bandwidth control deals out nothing smaller."""
CPU_MAX = 100_000.0
"""More CPUs than any machine has; the kernel refuses what is far above."""
PIDS_MAX = 4_194_304
"""The most processes that a Linux can have."""
BYTES_MAX = (1 << 63) - 1
"""The largest file, and more than any memory: the kernel counts in 64 bits."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])?", re.ASCII | re.IGNORECASE)
_UNIT_BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class ResourceLimits:
    """Limits of one branch, or, as `group_limits`, of all branches of a call together.

    None is no limit. Zero is an error, and so is all that could not limit anything: ValueError,
    or TypeError for a value of the wrong type. A limit that the machine cannot enforce raises
    ProcessBranchError before anything runs; none is ever ignored.
    """

    memory: int | None = None
    """Bytes of memory, files in a tmpfs and the page cache included; swap is no way around it.
    Above it the kernel kills (the branch ends as "oom")."""
    cpu: float | None = None
    """Share of CPU time; 0.5 is half of one CPU, 2.0 two whole ones. Above it the branch waits."""
    _: KW_ONLY
    memory_high: int | None = None
    """Bytes of memory above which the kernel slows the branch down and reclaims (cgroup v2)."""
    oom_group: bool = False
    """Out of memory, all processes of the branch are killed, not only the largest."""
    pids: int | None = None
    """Processes and threads at one time. Above it fork fails with EAGAIN."""
    disk: int | None = None
    """Bytes that the branch may add to its layer. Above it writing fails with EDQUOT."""
    wall_time: float | None = None
    """Seconds from the start, after which the branch is killed (it ends as "timeout")."""

    def __post_init__(self) -> None:
        for name in ("memory", "memory_high", "disk"):
            _check_count(name, getattr(self, name), at_most=BYTES_MAX)
        _check_count("pids", self.pids, at_most=PIDS_MAX)
        _check_number("cpu", self.cpu, at_least=CPU_MIN, at_most=CPU_MAX)
        _check_number("wall_time", self.wall_time)
        if not isinstance(self.oom_group, bool):
            raise TypeError(f"oom_group must be a bool, not {self.oom_group!r}")

    @property
    def needs_cgroup(self) -> bool:
        """Whether any of the limits is one that a control group enforces."""
        return self.oom_group or any(
            limit is not None for limit in (self.memory, self.cpu, self.memory_high, self.pids)
        )


def parse_memory_size(text: str) -> int:
    """Reads 1048576, 512K, 1.5g as bytes; the units count by 1024. ValueError for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write 512M or 1.5G (units K, M, G, T)")
    return int(Fraction(match[1]) * _UNIT_BYTES[(match[2] or "").upper()])


def _check_count(name: str, value: object, *, at_most: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if value <= 0:
        raise ValueError(f"{name} must be more than zero, not {value}; None is no limit")
    if value > at_most:
        raise ValueError(f"{name} must be {at_most} or less, not {value}")


def _check_number(
    name: str, value: object, *, at_least: float = 0.0, at_most: float = math.inf
) -> None:
    if value is None:
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be more than zero, not {value!r}; None is no limit")
    if value < at_least:
        raise ValueError(f"{name} must be {at_least:g} or more, not {value!r}")
    if value > at_most:
        raise ValueError(f"{name} must be {at_most:g} or less, not {value!r}")
