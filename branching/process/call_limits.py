"""The limits of a call: those of each branch, and those of all branches together.

CallLimits are open for the duration of a call. Opening them tries every limit once, so that a limit
that cannot be enforced raises an error before anything runs. Each command then gets its own scope:

    group                 the whole call, if it needs a control group
    ├── branch-5f3e       a command
    └── branch-77aa

Control groups do not limit disk space: the code that creates the branches applies `disk_each` and
`disk_together`. `told` determines which limit caused the end of a command.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from branching.process.cgroup import Cgroup, Usage
from branching.process.limits import ResourceLimits
from branching.process.process_result import Ended

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

    @contextmanager
    def watch(self, kill: Callable[[], None]) -> Iterator[threading.Event]:
        """Returns a context that calls `kill` when the time limit of one command expires.

        Args:
            kill: Called from another thread.

        Yields:
            An event that is set before `kill` is called.
        """
        is_over = threading.Event()
        seconds = self.wall_seconds
        if seconds is None:
            yield is_over
            return

        def end() -> None:
            is_over.set()
            kill()

        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), end)
        timer.daemon = True
        timer.start()
        try:
            yield is_over
        finally:
            timer.cancel()
            timer.join()


def told(ended: Ended, *, usage: Usage | None, disk_refusals: int, is_over: bool) -> Ended:
    """Adds resource usage, and the limit that made the command fail, to the end of a command.

    Args:
        ended: How the command ended.
        usage: Counters of its control group, if it had one.
        disk_refusals: Number of changes that the disk limit refused while it ran.
        is_over: Whether it was killed because its time limit expired.

    Returns:
        A copy of `ended` with these facts.
    """
    if usage is not None:
        ended = replace(
            ended,
            memory_peak=ended.memory_peak if usage.memory_peak is None else usage.memory_peak,
            cpu_seconds=ended.cpu_seconds if usage.cpu_seconds is None else usage.cpu_seconds,
        )
    if is_over:
        return replace(ended, how="timeout", reason=f"its time was over ({ended.reason})")
    if ended.success or ended.how not in ("exit", "signal"):
        return ended
    if usage is not None and usage.oom_kills:
        return replace(ended, how="oom", reason=f"out of memory ({ended.reason})")
    if disk_refusals:
        return replace(ended, how="disk", reason=f"disk limit reached ({ended.reason})")
    if usage is not None and usage.forks_refused:
        return replace(ended, how="pids", reason=f"too many processes ({ended.reason})")
    return ended


def _shorter(one: float | None, other: float | None) -> float | None:
    known = [seconds for seconds in (one, other) if seconds is not None]
    return min(known, default=None)
