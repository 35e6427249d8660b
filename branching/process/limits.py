"""Resource limits of a branch, as plain values. Each field states how it is enforced."""

from __future__ import annotations

import math
import re
from dataclasses import KW_ONLY, dataclass

CPU_MIN = 0.001
"""One millisecond per second, the smallest share that the kernel's bandwidth control supports."""
CPU_MAX = 100_000.0
"""More CPUs than any machine has. The kernel refuses much larger values."""
PIDS_MAX = 4_194_304
"""The maximum number of processes of a Linux kernel."""
BYTES_MAX = (1 << 63) - 1
"""The maximum file size. The kernel counts bytes in 64 bits."""

_SIZE = r"(\d+(?:\.\d+)?)\s*([KMGT])?"
_UNIT_BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class ResourceLimits:
    """Limits of one branch, or, as `group_limits`, of all branches of a call together.

    None means no limit. No limit is ever ignored: one that the machine cannot enforce raises
    ProcessBranchError before anything runs.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is zero, negative, or out of range.
    """

    memory: int | None = None
    """Bytes of memory, including files in a tmpfs and the page cache. Swap does not extend it.
    Above it the kernel kills processes of the branch, which ends as "oom"."""
    cpu: float | None = None
    """Number of CPUs: 0.5 is half a CPU, 2.0 is two. Above it the kernel throttles the branch."""
    _: KW_ONLY
    memory_high: int | None = None
    """Bytes of memory above which the kernel throttles the branch and reclaims (cgroup v2)."""
    oom_group: bool = False
    """When memory runs out, kill all processes of the branch instead of only the largest."""
    pids: int | None = None
    """Number of concurrent processes and threads. Above it fork fails with EAGAIN."""
    disk: int | None = None
    """Bytes that the branch may add to its layer. Above it writes fail with EDQUOT."""
    wall_time: float | None = None
    """Seconds after the start at which the branch is killed. It ends as "timeout"."""

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
        """Whether one of the limits is enforced by a control group."""
        return self.oom_group or any(
            limit is not None for limit in (self.memory, self.cpu, self.memory_high, self.pids)
        )


def parse_memory_size(text: str) -> int:
    """Parses a size such as 1048576, 512K or 1.5g.

    Args:
        text: A number with an optional unit K, M, G or T, which are powers of 1024.

    Returns:
        The size in bytes.

    Raises:
        ValueError: The text is not a size.
    """
    match = re.fullmatch(_SIZE, text.strip(), re.ASCII | re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write 512M or 1.5G (units K, M, G, T)")
    from fractions import Fraction

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
