"""Control groups version 2: one hierarchy, one directory for each cgroup.

A controller is enabled in a cgroup by its parent's `cgroup.subtree_control`. A cgroup that enables
controllers must not have processes itself (except for the root). So the processes in our own
cgroup, including this one, are first moved to a leaf.

    our own cgroup              delegated: a container's, or a scope from systemd
    ├── branching-leaf          the processes of our own cgroup
    └── branching-1234-5f3e     a branch, or the cgroup of all branches of a call
        └── branch-77aa         a branch
"""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

from branching.process.cgroup.cgroup_dir import NAME_PREFIX, CgroupDir
from branching.process.cgroup.interface import (
    Setting,
    Usage,
    cannot_limit,
    controllers_for,
    microseconds,
)
from branching.process.limits import ResourceLimits

LEAF = NAME_PREFIX + "leaf"
MOVES_MAX = 50
"""How often moving is repeated because of processes that were forked meanwhile."""

_ACCOUNTS = ("memory", "pids")
_FREEZE_SECONDS_MAX = 1.0
_POLL_SECONDS = 0.001


class V2Group:
    """A group, or the place that groups are made in."""

    def __init__(self, directory: CgroupDir) -> None:
        self._directory = directory

    @property
    def path(self) -> Path:
        return self._directory.path

    @property
    def descriptor(self) -> int | None:
        return self._directory.descriptor

    def make_child(
        self, name: str, limits: ResourceLimits, below: ResourceLimits | None = None
    ) -> V2Group:
        # A group can pass on only what it was given itself.
        self._enable({**controllers_for(below or limits), **controllers_for(limits)})
        child = V2Group(self._directory.make_child(name))
        try:
            for setting in child._settings(limits):
                try:
                    child._directory.write(setting.file, setting.value)
                except OSError as error:
                    raise cannot_limit(setting.limit, str(error)) from error
        except BaseException:
            child.remove()
            raise
        return child

    def _enable(self, needed: dict[str, str]) -> None:
        """Enables the required controllers for the children, and those for accounting."""
        available = self._directory.read("cgroup.controllers").split()
        for controller, limit in needed.items():
            if controller not in available:
                raise cannot_limit(
                    limit,
                    f"{self.path} does not have the {controller} controller",
                    "an administrator enables it for user sessions by `systemctl edit "
                    "user@.service` with [Service] Delegate=cpu memory pids",
                )
        enabled = self._directory.read("cgroup.subtree_control").split()
        wanted = [name for name in (*needed, *_ACCOUNTS) if name in available]
        missing = sorted({name for name in wanted if name not in enabled})
        if not missing:
            return
        for _ in range(MOVES_MAX):
            self._empty()
            try:
                self._directory.write("cgroup.subtree_control", " ".join(f"+{n}" for n in missing))
                return
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                refusal = error
        raise refusal

    def _empty(self) -> None:
        is_true_root = not self._directory.has("cgroup.type")
        if is_true_root:
            return
        residents = self._directory.read("cgroup.procs").split()
        if not residents:
            return
        try:
            leaf = self._directory.make_child(LEAF)
        except FileExistsError:
            leaf = self._directory.open_child(LEAF)
        try:
            for pid in residents:
                try:
                    leaf.write("cgroup.procs", pid)
                except ProcessLookupError:
                    pass
        finally:
            leaf.close()

    def _settings(self, limits: ResourceLimits) -> list[Setting]:
        found = []

        def put(limit: str, file: str, value: object) -> None:
            found.append(Setting(limit=limit, file=file, value=str(value)))

        if limits.memory is not None:
            put("memory", "memory.max", limits.memory)
            if self._directory.has("memory.swap.max"):
                put("memory", "memory.swap.max", 0)
        if limits.memory_high is not None:
            put("memory_high", "memory.high", limits.memory_high)
        if limits.oom_group:
            put("oom_group", "memory.oom.group", 1)
        if limits.cpu is not None:
            quota, period = microseconds(limits.cpu)
            put("cpu", "cpu.max", f"{quota} {period}")
        if limits.pids is not None:
            put("pids", "pids.max", limits.pids)
        return found

    def add(self, pid: int) -> None:
        self._directory.write("cgroup.procs", str(pid))

    def processes(self) -> list[int]:
        return self._directory.processes()

    def usage(self) -> Usage:
        group = self._directory
        peak = int(group.read("memory.peak")) if group.has("memory.peak") else None
        has_memory, has_pids = group.has("memory.events"), group.has("pids.events")
        return Usage(
            memory_peak=peak,
            cpu_seconds=group.read_fields("cpu.stat")["usage_usec"] / 1e6,
            oom_kills=group.read_fields("memory.events")["oom_kill"] if has_memory else 0,
            forks_refused=group.read_fields("pids.events")["max"] if has_pids else 0,
        )

    def kill(self) -> None:
        if self._directory.has("cgroup.kill"):  # since Linux 5.14
            self._directory.write("cgroup.kill", "1")
            return
        self._directory.write("cgroup.freeze", "1")
        deadline = time.monotonic() + _FREEZE_SECONDS_MAX
        while not self._directory.read_fields("cgroup.events")["frozen"]:
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)  # in version 2, SIGKILL ends frozen processes
            except ProcessLookupError:
                pass
        self._directory.write("cgroup.freeze", "0")

    def remove(self) -> None:
        self._directory.remove()

    def close(self) -> None:
        self._directory.close()
