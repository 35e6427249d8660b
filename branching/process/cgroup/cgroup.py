"""A control group of ours from its making to its removal: the face of this package."""

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
    """A group whose processes are limited together, killed together, and counted together.

    As a context manager it is removed at the end. A scope made below another is limited by both;
    only the innermost ones have processes.
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
        """Makes a scope that enforces those of `limits` that a control group can. `below` are those
        of scopes that will be made below it.

        Raises ProcessBranchError that names a limit which cannot be enforced, why, and what to
        do; then there is no scope.
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
        """Where the group is. In version 1 there are more: this is that of memory, if there."""
        return self._group.path

    @property
    def descriptor(self) -> int | None:
        """The group's directory, for clone3 with CLONE_INTO_CGROUP; None for version 1."""
        return self._group.descriptor

    def add(self, pid: int) -> None:
        """Moves a process into the group. It must not have forked yet: hold it at a gate.

        Raises ProcessBranchError when it could not be moved; its end is the caller's to see to.
        """
        try:
            self._group.add(pid)
        except OSError as error:
            raise ProcessBranchError(
                f"process {pid} could not be put under its limits: {error}", path=str(self.path)
            ) from error

    def processes(self) -> list[int]:
        """Returns the living processes in the scope and in those below it."""
        return self._group.processes()

    def usage(self) -> Usage:
        """Returns what was used so far; after `remove()`, what was used in all."""
        return self._usage if self._usage is not None else self._group.usage()

    def kill(self) -> None:
        """Sends SIGKILL to every process in the scope. Does not wait for their end."""
        if self._usage is None:
            self._group.kill()

    def remove(self) -> None:
        """Kills what is left, waits for its end, and removes the group. A second call does nothing.

        Raises ProcessBranchError when a process does not die within a bound.
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
