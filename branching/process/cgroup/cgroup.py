"""The interface of this package: a cgroup with limits, from its creation to its removal."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from types import TracebackType

from branching.errors import ProcessBranchError
from branching.process.cgroup import discovery
from branching.process.cgroup.cgroup_dir import NAME_PREFIX, REMOVE_SECONDS_MAX
from branching.process.cgroup.interface import Group, Usage, cannot_limit, controllers_for
from branching.process.limits import ResourceLimits

_POLL_SECONDS = 0.001


class Cgroup:
    """A cgroup: its processes share limits and accounting, and can be killed together.

    As a context manager it is removed at the end. The limits of a parent apply to its children,
    too. Only cgroups without children have processes.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._usage: Usage | None = None

    @staticmethod
    def create(
        limits: ResourceLimits,
        *,
        parent: Cgroup | None = None,
        below: ResourceLimits | None = None,
    ) -> Cgroup:
        """Creates a cgroup.

        Args:
            limits: The limits. Those that a cgroup cannot enforce are ignored here.
            parent: The cgroup to create it in. Default: that of this process.
            below: The limits of the cgroups that will be created in it.

        Raises:
            ProcessBranchError: A limit cannot be enforced. The error names it; no cgroup was
                created.
        """
        token = secrets.token_hex(4)
        purpose = limits if limits.needs_cgroup else below or limits
        try:
            if parent is not None:
                return Cgroup(parent._group.make_child(f"branch-{token}", limits, below))
            place = discovery.find(purpose)
            try:
                name = f"{NAME_PREFIX}{os.getpid()}-{token}"
                return Cgroup(place.make_child(name, limits, below))
            finally:
                place.close()
        except OSError as error:
            limit = next(iter(controllers_for(purpose).values()), "resources")
            raise cannot_limit(limit, str(error)) from error

    @property
    def path(self) -> Path:
        """The cgroup's directory; in version 1, that of the memory controller if it is used."""
        return self._group.path

    @property
    def descriptor(self) -> int | None:
        """The directory's descriptor, for clone3 with CLONE_INTO_CGROUP; None for version 1."""
        return self._group.descriptor

    def add(self, pid: int) -> None:
        """Moves a process into the cgroup. Its existing children are not moved.

        Raises:
            ProcessBranchError: The process could not be moved. The caller must end it.
        """
        try:
            self._group.add(pid)
        except OSError as error:
            raise ProcessBranchError(
                f"process {pid} could not be put under its limits: {error}", path=str(self.path)
            ) from error

    def processes(self) -> list[int]:
        """Returns the pids of the live processes in the cgroup and its descendants."""
        return self._group.processes()

    def usage(self) -> Usage:
        """Returns the usage so far; after `remove()`, the total usage."""
        return self._usage if self._usage is not None else self._group.usage()

    def kill(self) -> None:
        """Sends SIGKILL to all processes in the cgroup. Does not wait until they have ended."""
        if self._usage is None:
            self._group.kill()

    def remove(self) -> None:
        """Kills the remaining processes, waits until they have ended, and removes the cgroup.

        A second call does nothing.

        Raises:
            ProcessBranchError: A process has not ended after `REMOVE_SECONDS_MAX`. The cgroup
                stays, and `remove` can be called again.
        """
        if self._usage is not None:
            return
        deadline = time.monotonic() + REMOVE_SECONDS_MAX
        try:
            while self._group.processes():
                if time.monotonic() > deadline:
                    raise OSError(None, "its processes do not die")
                self._group.kill()
                time.sleep(_POLL_SECONDS)
            usage = self._group.usage()
            self._group.remove()
        except OSError as error:
            raise ProcessBranchError(
                f"the control group {self.path} could not be removed: {error}",
                hint=f"see {self.path}/cgroup.procs for the processes, /proc/PID/stack for why",
                path=str(self.path),
            ) from error
        self._usage = usage

    def __enter__(self) -> Cgroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()
