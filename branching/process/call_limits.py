"""The limits of a call: what each of its branches may use, and all of them together.

CallLimits are open for the length of a call. Opening it tries every limit once, so that one that
cannot be enforced is an error before anything runs. Each command then gets a scope of its own:

    group                 all of the call, if it needs a control group at all
    ├── branch-5f3e       a command
    └── branch-77aa

Limits on disk space are no control group's: whoever makes the branches asks for `disk_each` and
`disk_together`. `told` says of a command's end which of its limits it met.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from branching.process.cgroup import Cgroup, Usage
from branching.process.process_result import Ended
from branching.process.resource_limits import ResourceLimits

_NONE = ResourceLimits()


class CallLimits:
    """What a call may use. `open()` it first and `close()` it when nothing of it runs any more."""

    def __init__(self, each: ResourceLimits | None, together: ResourceLimits | None) -> None:
        self._each = each or _NONE
        self._together = together or _NONE
        self._group: Cgroup | None = None

    @property
    def limits(self) -> ResourceLimits:
        """What each branch may use."""
        return self._each

    @property
    def group(self) -> Cgroup | None:
        """The scope of all of the call, while it is open and needs one."""
        return self._group

    @property
    def disk_each(self) -> int | None:
        """Bytes that a branch may add."""
        return self._each.disk

    @property
    def disk_together(self) -> int | None:
        """Bytes that all branches may add together."""
        return self._together.disk

    @property
    def wall_seconds(self) -> float | None:
        """How long each command or function may run."""
        return _shorter(self._each.wall_time, self._together.wall_time)

    def open(self) -> None:
        """Makes sure that every limit can be enforced. ProcessBranchError names one that cannot."""
        if not (self._each.needs_cgroup or self._together.needs_cgroup):
            return
        self._group = Cgroup.create(self._together, below=self._each)
        try:
            Cgroup.create(self._each, parent=self._group).remove()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends what is left of the call's processes. A second call does nothing."""
        if self._group is not None:
            self._group.remove()
            self._group = None

    def scope(self) -> Cgroup | None:
        """Makes the scope of one command; None where none is needed. It is the caller's."""
        return None if self._group is None else Cgroup.create(self._each, parent=self._group)

    @contextmanager
    def watch(self, kill: Callable[[], None]) -> Iterator[threading.Event]:
        """Calls `kill` when the time of one command is over; tells by the event that it did."""
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
    """Returns the end with what its control group counted, and with the limit that was met, where
    the command failed for it."""
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
