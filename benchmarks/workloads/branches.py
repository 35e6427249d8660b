"""Branches themselves: made, committed, dropped, many at a time, and deep."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ..contestants.native import Native
from ..field.race import Turn, Workload
from ..field.sizes import MIB, Size
from . import tree

FILE = b"x" * 4096


def _big_tree(directory: Path, size: Size) -> None:
    tree.make(directory, size.big_tree_files)


def _create(turn: Turn) -> None:
    files = turn.size.big_tree_files
    contestant = turn.contestant
    with turn.timed(f"create a branch of {files} files"):
        name = contestant.create("b")
    turn.expect((contestant.path(name) / tree.names(files)[-1]).exists(), True, "the last file:")
    with turn.timed("drop it, unchanged"):
        contestant.abort(name)


def _flat(directory: Path, size: Size) -> None:
    """Half of the most files that a commit brings: so half of them replace what is there."""
    for number in range(max(size.commit_files) // 2 + 1):
        (directory / f"f{number}").write_bytes(b"old")
    tree.make(directory, 0)


def _fill(directory: Path, count: int, present: int) -> None:
    """Writes `count` files, half over what is there, if there is that much."""
    first = max(0, present - (count + 1) // 2)
    for number in range(first, first + count):
        (directory / f"f{number}").write_bytes(FILE)


def _commits(turn: Turn) -> None:
    contestant = turn.contestant
    present = max(turn.size.commit_files) // 2 + 1
    for count in turn.size.commit_files:
        row = f"commit {count} files of 4 KiB" if count > 1 else "commit 1 file of 4 KiB"
        with turn.optional(row):
            _commit(turn, row, count, present)
        if turn.native:
            continue
        name = contestant.create(f"drop{count}")
        _fill(contestant.path(name), count, present)
        with turn.timed(row.replace("commit", "drop")):
            contestant.abort(name)
    row = f"commit {turn.size.commit_bytes // MIB} MiB in one file"
    with turn.optional(row):
        _commit(turn, row, 0, present)


def _commit(turn: Turn, row: str, count: int, present: int) -> None:
    """Commits `count` files, or one big one where that is none."""
    contestant = turn.contestant
    if isinstance(contestant, Native):
        place = contestant.scratch / f"prepared{count}"
        place.mkdir()
    else:
        name = contestant.create(f"c{count}")
        place = contestant.path(name)
    if count:
        _fill(place, count, present)
    else:
        with (place / "heavy").open("wb") as file:
            for _ in range(turn.size.commit_bytes // MIB):
                file.write(FILE * (MIB // len(FILE)))
            file.flush()
            os.fsync(file.fileno())  # its writing is the work's, not the commit's
    with turn.timed(row):
        if isinstance(contestant, Native):
            contestant.renames(place)
        else:
            contestant.commit(name)
    if count:
        last = max(0, present - (count + 1) // 2) + count - 1
        turn.expect((contestant.base / f"f{last}").read_bytes(), FILE, "the file says")
    else:
        found = (contestant.base / "heavy").stat().st_size
        turn.expect(found, turn.size.commit_bytes, "bytes committed")


def _small_tree(directory: Path, size: Size) -> None:
    tree.make(directory, min(200, size.tree_files), git=False)


def _width(turn: Turn) -> None:
    contestant = turn.contestant
    count = turn.size.branches
    took = []
    branches = []
    turn.row = f"create, first tenth of {count} branches"
    if turn.native:
        return
    for number in range(count):
        begun = time.perf_counter()
        branches.append(contestant.create(f"w{number}"))
        took.append(time.perf_counter() - begun)
        (contestant.path(branches[-1]) / "own").write_bytes(b"x")
    tenth = max(1, count // 10)
    turn.record(turn.row, sum(took[:tenth]) / tenth, "s")
    turn.record(f"create, last tenth of {count} branches", sum(took[-tenth:]) / tenth, "s")
    row = f"memory of the daemons, {count} branches alive"
    with turn.optional(row):
        resident = sum(_resident_bytes(pid) for pid in contestant.daemons())
        turn.record(row, resident, "B")


def _resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def _depth(turn: Turn) -> None:
    contestant = turn.contestant
    directory = contestant.base
    name = None
    for level in range(turn.size.depth):
        if turn.native:
            (directory / f"own{level}").write_bytes(b"x")
            continue
        turn.row = f"create a branch at depth {level + 1}"
        if level + 1 == turn.size.depth:
            with turn.timed(turn.row):
                name = contestant.create(f"n{level}", name)
        else:
            name = contestant.create(f"n{level}", name)
        directory = contestant.path(name)
        (directory / f"own{level}").write_bytes(b"x")
    names = tree.names(min(200, turn.size.tree_files))
    for row in ("first", "again"):
        with turn.timed(f"stat a file at depth {turn.size.depth}, {row}", times=len(names)):
            for path in names:
                os.stat(directory / path)  # noqa: PTH116 # as cheaply as can be
    with turn.timed(f"look up what is not there, depth {turn.size.depth}", times=len(names)):
        for path in names:
            (directory / f"{path}.absent").exists()
    found = sum(entry.startswith("own") for entry in os.listdir(directory))  # noqa: PTH208
    turn.expect(found, turn.size.depth, "files of the levels above listed:")


CREATE = Workload(
    name="creating a branch", base=_big_tree, work=_create, copies=True, only_reads=True
)
COMMITS = Workload(
    name="committing and dropping", base=_flat, work=_commits, copies=True, changes_base=True
)
WIDTH = Workload(name="many branches", base=_small_tree, work=_width, only_reads=True)
DEPTH = Workload(name="deep branches", base=_small_tree, work=_depth)
