"""Runs each workload with each contestant, run by run, and keeps what came out.

Everybody's turn comes in each run, and each run begins with another one, so that whoever warms the
disk up is not always the same. A turn: a fresh scratch directory, `begin`, the work, `end`, and the
scratch directory is gone. What native or a commit changes is a copy of the base, made outside of
the clock.

A workload makes the runs of its size while they fit in its share of the time that is left, and at
least as many as a ratio takes: what is quick is measured more often.

A contestant that fails gives up its turn there: the row it was in and those that it did not reach
carry the reason. A row with fewer samples than runs is no figure.

A workload that is pinned runs with daemon and client on one CPU (a daemon inherits the affinity). A
round trip between CPUs costs ten times one on the same CPU on many virtual machines, and which of
the two a run gets is chance: it would drown everything else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .contestant import Cannot, Contestant, await_end
from .figures import RUNS_MIN
from .sizes import Size

NATIVE = "native"


class Wrong(Exception):
    """A contestant did the work, but what came out is not what native gives."""


FAILURES = (Cannot, Wrong, OSError, subprocess.CalledProcessError)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One kind of work: the base it begins with, and what is done in a branch of it."""

    name: str
    base: Callable[[Path, Size], None]
    work: Callable[[Turn], None]
    copies: bool = False
    """Those whose branches are copies take part; else their figures would be native's."""
    changes_base: bool = False
    only_reads: bool = False
    """Native works in the base itself. git knows files by their inodes: a copy's are others."""
    pinned: bool = True


@dataclass(kw_only=True)
class Turn:
    """One contestant's turn in one workload of one run."""

    contestant: Contestant
    size: Size
    record: Callable[[str, float, str], None]
    refuse: Callable[[str, str], None]
    row: str = ""

    @property
    def native(self) -> bool:
        return self.contestant.name == NATIVE

    def branch(self, name: str = "first", parent: str | None = None) -> Path:
        """Returns the directory to work in: of a new branch, or native's base."""
        return self.contestant.path(name if self.native else self.contestant.create(name, parent))

    @contextmanager
    def timed(self, row: str, *, times: int = 1) -> Iterator[None]:
        """Records the seconds that the block takes as a sample of `row`, for one of `times`."""
        self.row = row
        begun = time.perf_counter()
        yield
        self.record(row, (time.perf_counter() - begun) / times, "s")
        self.row = ""

    @contextmanager
    def optional(self, row: str) -> Iterator[None]:
        """Notes what stops the block as the reason why there is no `row`; the turn goes on."""
        self.row = row
        try:
            yield
        except FAILURES as failure:
            self.refuse(row, str(failure))
        self.row = ""

    def expect(self, found: object, wanted: object, what: str) -> None:
        """Raises Wrong unless the work gave what it must."""
        if found != wanted:
            raise Wrong(f"wrong result: {what} {found}, not {wanted}")


@dataclass
class Result:
    """All that a race gave: samples by workload, row and contestant, and reasons for what lacks."""

    rows: dict[str, list[str]] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    samples: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """By row and contestant."""
    refusals: dict[tuple[str, str], str] = field(default_factory=dict)
    """By workload, or row, and contestant."""
    not_run: dict[str, str] = field(default_factory=dict)
    """By workload: why it could not be run at all."""
    requests: dict[str, dict[str, int]] = field(default_factory=dict)
    """By workload: what our fuse driver was asked in the first run, by kind."""
    pinned: dict[str, bool] = field(default_factory=dict)
    runs: dict[str, int] = field(default_factory=dict)
    """By workload: how many were made."""


def race(
    workloads: list[Workload],
    contestants: list[Contestant],
    size: Size,
    place: Path,
    tell: Callable[[str], None],
) -> Result:
    """Runs it all below `place`, of which nothing is left; `tell` hears what is going on."""
    result = Result()
    end = time.monotonic() + size.minutes * 60
    able = []
    for contestant in contestants:
        try:
            contestant.check()
            able.append(contestant)
        except Cannot as reason:
            for workload in workloads:
                result.refusals[workload.name, contestant.name] = str(reason)
    for position, workload in enumerate(workloads):
        begun = time.monotonic()
        share_end = begun + (end - begun) / (len(workloads) - position)
        result.rows[workload.name] = []
        result.pinned[workload.name] = workload.pinned
        result.runs[workload.name] = 0
        taking_part = [one for one in able if workload.copies or not one.copies]
        with _directory(place) as room:
            base = room / "base"
            base.mkdir()
            try:
                workload.base(base, size)
            except Cannot as reason:
                tell(f"{workload.name}: not run: {reason}")
                result.not_run[workload.name] = str(reason)
                continue
            slowest = 0.0
            for run in range(size.runs):
                now = time.monotonic()
                if run >= RUNS_MIN and now + slowest > share_end:
                    tell(f"{workload.name}: its time is up")
                    break
                first = run % len(taking_part)
                for one in taking_part[first:] + taking_part[:first]:
                    tell(f"{workload.name}: run {run + 1} of {size.runs}: {one.name}")
                    _turn(workload, one, size, room, result)
                slowest = max(slowest, time.monotonic() - now)
                result.runs[workload.name] = run + 1
    return result


def _turn(
    workload: Workload, contestant: Contestant, size: Size, room: Path, result: Result
) -> None:
    def record(row: str, value: float, unit: str) -> None:
        if row not in result.rows[workload.name]:
            result.rows[workload.name].append(row)
        result.units[row] = unit
        result.samples.setdefault((row, contestant.name), []).append(value)

    def refuse(row: str, reason: str) -> None:
        result.refusals[row, contestant.name] = reason

    turn = Turn(contestant=contestant, size=size, record=record, refuse=refuse)
    with _directory(room) as scratch, _affinity(workload.pinned):
        base = room / "base"
        if workload.changes_base or (turn.native and not workload.only_reads):
            base = scratch / "base"
            subprocess.run(["cp", "-a", room / "base", base], check=True)
        (scratch / "own").mkdir()
        try:
            try:
                contestant.begin(base, scratch / "own")
                workload.work(turn)
                ask = getattr(contestant, "requests", None)
                if ask and workload.name not in result.requests and "fuse" in contestant.name:
                    result.requests[workload.name] = ask()
            finally:
                contestant.end()
        except FAILURES as failure:
            if turn.row:
                refuse(turn.row, str(failure))
            refuse(workload.name, str(failure))


@contextmanager
def _directory(parent: Path) -> Iterator[Path]:
    """A new directory in `parent`, gone afterwards; mounts that a failure left in it go first."""
    path = Path(tempfile.mkdtemp(prefix="b", dir=parent))
    try:
        yield path
    finally:
        for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
            mountpoint = line.split()[4].encode().decode("unicode_escape")
            if mountpoint.startswith(f"{path}/"):
                subprocess.run(["umount", "--lazy", mountpoint], check=False)
        await_end(f"{path}/")
        shutil.rmtree(path)


@contextmanager
def _affinity(pinned: bool) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    if pinned:
        os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
