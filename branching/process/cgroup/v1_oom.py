"""Kills a whole version 1 group when the kernel has killed one of its processes for memory.

Version 2 has `memory.oom.group` for that. Version 1 notifies an eventfd of an out-of-memory
condition (memory controller documentation, section 10) before it kills a process. A thread waits
for the notification and for the kill, then kills the other processes, which run on until then.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

from branching.process.cgroup.cgroup_dir import CgroupDir
from branching.process.cgroup.remount import started

VICTIM_SECONDS_MAX = 1.0
"""How long to wait for the kill; the kernel may reclaim memory instead."""

_POLL_SECONDS = 0.002


class OomWatch:
    """Watches until `stop()`."""

    def __init__(
        self, memory: CgroupDir, oom_kills: Callable[[], int], kill: Callable[[], None]
    ) -> None:
        self._oom_kills = oom_kills
        self._kill = kill
        self._thread = threading.Thread(target=self._watch, name="oom watch", daemon=True)
        self._told = os.eventfd(0, os.EFD_CLOEXEC)
        try:
            self._stopped = os.eventfd(0, os.EFD_CLOEXEC)
        except OSError:
            os.close(self._told)
            raise
        try:
            control = os.open(
                "memory.oom_control", os.O_RDONLY | os.O_CLOEXEC, dir_fd=memory.descriptor
            )
            try:
                memory.write("cgroup.event_control", f"{self._told} {control}")
            finally:
                os.close(control)
            started(self._thread)
        except BaseException:
            self._close()
            raise

    def stop(self) -> None:
        """Ends the watch and waits for that."""
        os.eventfd_write(self._stopped, 1)
        self._thread.join()
        self._close()

    def _watch(self) -> None:
        while True:
            ready, _, _ = select.select([self._told, self._stopped], [], [])
            if self._stopped in ready:
                return
            os.eventfd_read(self._told)
            deadline = time.monotonic() + VICTIM_SECONDS_MAX
            while time.monotonic() < deadline:
                if self._oom_kills():
                    self._kill()
                    return
                time.sleep(_POLL_SECONDS)

    def _close(self) -> None:
        os.close(self._told)
        os.close(self._stopped)
