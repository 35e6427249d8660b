"""What a test may leave behind by mistake, seen from outside."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from support.groups import groups

SETTLE_SECONDS_MAX = 30.0
"""A killed process needs a moment to be reaped by whoever inherits it, and the server of sandboxes
half a second without work to end, on a machine that may be busy with other things."""


@dataclass(frozen=True)
class Traces:
    """Mounts and files in a directory, our child processes, and control groups of ours."""

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
        """Tells what is here now and was not then, or "". Waits for what is just going away."""
        deadline = time.monotonic() + SETTLE_SECONDS_MAX
        while left := self._added():
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


def processes_in(directory: Path) -> list[str]:
    """Lists the processes that work in `directory` or below it, or in a sandbox that shows it."""
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


def _children() -> list[int]:
    pids: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        try:
            pids += map(int, (task / "children").read_text().split())
        except OSError:
            continue  # the thread has ended meanwhile
    return pids


def _describe(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return f"{pid} {b' '.join(words).decode(errors='replace')}"
    except OSError:
        return str(pid)
