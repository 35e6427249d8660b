"""Control groups version 1: each controller has its own hierarchy, with a directory in each.

Differences from version 2 that matter here:

- There is no `memory.high`; that limit is refused.
- When out of memory, the kernel kills one process. `OomWatch` implements `oom_group`.
- There is no `cgroup.kill`. The cgroup is frozen, so that no process can fork, killed, and thawed.
- A process must be written to every directory, so a child waits at a gate until then.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from branching.process.cgroup.cgroup_dir import CgroupDir
from branching.process.cgroup.interface import (
    Setting,
    Usage,
    cannot_limit,
    controllers_for,
    microseconds,
)
from branching.process.cgroup.v1_oom import OomWatch
from branching.process.limits import ResourceLimits

KEPT_BY = ("memory", "cpu", "cpuacct", "pids", "freezer")
"""The controllers whose hierarchies a group has a directory in: limits, accounts, killing."""
FREEZE_SECONDS_MAX = 1.0
"""A process in an uninterruptible wait cannot be frozen; it is killed all the same."""

_POLL_SECONDS = 0.001


class V1Group:
    """A cgroup with a directory in each hierarchy."""

    def __init__(self, directories: Mapping[str, CgroupDir]) -> None:
        self._of = dict(directories)
        self._oom_watch: OomWatch | None = None

    @property
    def path(self) -> Path:
        return next(iter(self._of.values())).path

    @property
    def descriptor(self) -> int | None:
        return None

    def make_child(
        self, name: str, limits: ResourceLimits, below: ResourceLimits | None = None
    ) -> V1Group:
        for asked in (
            limits,
            below or limits,
        ):  # refuse limits of children before anything is created
            if asked.memory_high is not None:
                raise cannot_limit(
                    "memory_high",
                    "this system has cgroup v1, which cannot slow a group down",
                    "use memory alone, or a system with cgroup v2",
                )
            for controller, limit in controllers_for(asked).items():
                if controller not in self._of:
                    raise cannot_limit(limit, f"the {controller} controller is missing")
        child = V1Group({})
        try:
            for directory in self._directories():
                made = directory.make_child(name)
                for controller, above in self._of.items():
                    if above is directory:
                        child._of[controller] = made
            child._apply(limits)
        except BaseException:
            child.remove()
            raise
        return child

    def _apply(self, limits: ResourceLimits) -> None:
        memory = self._of.get("memory")
        if memory is not None and memory.read("memory.use_hierarchy") == "0":
            memory.write("memory.use_hierarchy", "1")  # else groups below would not count
        for setting in self._settings(limits):
            directory = self._of[setting.file.partition(".")[0]]
            try:
                directory.write(setting.file, setting.value)
            except OSError as error:
                if setting.file == "cpu.cfs_quota_us" and error.errno == errno.EINVAL:
                    continue  # a group above has less; the kernel refuses more, and that one holds
                raise cannot_limit(setting.limit, str(error)) from error
        if limits.oom_group and memory is not None:
            self._oom_watch = OomWatch(memory, self._oom_kills, self.kill)

    def _settings(self, limits: ResourceLimits) -> list[Setting]:
        found = []

        def put(limit: str, file: str, value: int) -> None:
            found.append(Setting(limit=limit, file=file, value=str(value)))

        if limits.memory is not None:
            put("memory", "memory.limit_in_bytes", limits.memory)
            if self._of["memory"].has("memory.memsw.limit_in_bytes"):
                put("memory", "memory.memsw.limit_in_bytes", limits.memory)
            else:  # swap is not counted on this system; then none is used
                put("memory", "memory.swappiness", 0)
        if limits.cpu is not None:
            quota, period = microseconds(limits.cpu)
            put("cpu", "cpu.cfs_period_us", period)
            put("cpu", "cpu.cfs_quota_us", quota)
        if limits.pids is not None:
            put("pids", "pids.max", limits.pids)
        return found

    def add(self, pid: int) -> None:
        for directory in self._directories():
            directory.write("cgroup.procs", str(pid))

    def processes(self) -> list[int]:
        return sorted({pid for directory in self._directories() for pid in directory.processes()})

    def usage(self) -> Usage:
        memory, accounts, pids = (self._of.get(name) for name in ("memory", "cpuacct", "pids"))
        return Usage(
            memory_peak=int(memory.read("memory.max_usage_in_bytes")) if memory else None,
            cpu_seconds=int(accounts.read("cpuacct.usage")) / 1e9 if accounts else None,
            oom_kills=self._oom_kills(),
            forks_refused=pids.read_fields("pids.events")["max"] if pids else 0,
        )

    def kill(self) -> None:
        freezer = self._of.get("freezer")
        if freezer is not None:
            freezer.write("freezer.state", "FROZEN")
            deadline = time.monotonic() + FREEZE_SECONDS_MAX
            while freezer.read("freezer.state") != "FROZEN" and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if freezer is not None:
            freezer.write("freezer.state", "THAWED")

    def remove(self) -> None:
        if self._oom_watch is not None:
            self._oom_watch.stop()
            self._oom_watch = None
        failure: OSError | None = None
        for directory in self._directories():
            try:
                directory.remove()
            except OSError as error:
                failure = failure or error  # the other hierarchies' are removed all the same
        if failure is not None:
            raise failure

    def close(self) -> None:
        for directory in self._directories():
            directory.close()

    def _directories(self) -> list[CgroupDir]:
        # Controllers that are mounted together (cpu and cpuacct, often) share one.
        return list({id(directory): directory for directory in self._of.values()}.values())

    def _oom_kills(self) -> int:
        memory = self._of.get("memory")
        return 0 if memory is None else _oom_kills_in(memory)


def _oom_kills_in(directory: CgroupDir) -> int:
    """Version 1 counts the killed where they were, not in the groups above."""
    kills = directory.read_fields("memory.oom_control").get("oom_kill", 0)
    for name in directory.children():
        try:
            child = directory.open_child(name)
        except FileNotFoundError:
            continue
        try:
            kills += _oom_kills_in(child)
        finally:
            child.close()
    return kills
