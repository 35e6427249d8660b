"""Mounts, processes, files and control groups that a test has left behind."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from branching.process.sandbox import fork_server_client
from support.groups import groups

SETTLE_SECONDS_MAX = 60.0
"""A killed process must be reaped by its new parent, on a machine that may be busy."""


@dataclass(frozen=True)
class Traces:
    """Mounts and files in a directory, child processes, and control groups of this process."""

    directory: Path
    mounts: frozenset[str]
    files: frozenset[str]
    children: frozenset[int]
    groups: frozenset[str]

    @staticmethod
    def now(directory: Path) -> Traces:
        table = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        points = [line.split()[4] for line in table.splitlines()]
        return Traces(
            directory=directory,
            mounts=frozenset(point for point in points if point.startswith(f"{directory}/")),
            files=frozenset(entry.name for entry in directory.iterdir()),
            children=frozenset(_children()),
            groups=groups(),
        )

    def left_since(self) -> str:
        """Returns the new traces, or "". Waits for those that are going away."""
        deadline = time.monotonic() + SETTLE_SECONDS_MAX
        while left := self._added():
            _end_idle_server()
            if time.monotonic() > deadline:
                return left
            time.sleep(0.02)
        return ""

    def _added(self) -> str:
        after = Traces.now(self.directory)
        lines = [f"mount {point}" for point in sorted(after.mounts - self.mounts)]
        lines += [f"process {_describe(pid)}" for pid in sorted(after.children - self.children)]
        lines += [f"file {name}" for name in sorted(after.files - self.files)]
        lines += [f"control group {path}" for path in sorted(after.groups - self.groups)]
        return "\n".join(lines)


def _end_idle_server() -> None:
    """Ends this process's sandbox server, which would end after half a second without work.

    An idle server has one child, the spare init. While a sandbox runs it has more: then the server
    stays, and is reported with the sandbox.
    """
    server = fork_server_client._server
    if server is not None and len(_children(server._process.pid)) <= 1:
        fork_server_client._forget()


def processes_in(directory: Path) -> list[str]:
    """Lists processes whose working directory is in `directory`, or whose sandbox shows it."""
    found = []
    mark = b"BRANCHING_WORKSPACE=" + os.fsencode(directory)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            cwd = (entry / "cwd").readlink()
            is_told = mark in (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if cwd.is_relative_to(directory) or is_told:
            found.append(_describe(int(entry.name)))
    return found


def processes_in_namespace(name: str) -> list[str]:
    """Returns the pids in a process namespace, named as /proc/PID/ns/pid does."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if str((path / "ns" / "pid").readlink()) == name:
                found.append(path.name)
    return found


def _children(pid: int | str = "self") -> list[int]:
    pids: list[int] = []
    with suppress(OSError):  # the process has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # the thread has ended
                pids += map(int, (task / "children").read_text().split())
    return pids


def _describe(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return f"{pid} {b' '.join(words).decode(errors='replace')}"
    except OSError:
        return str(pid)
