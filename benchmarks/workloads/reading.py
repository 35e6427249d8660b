"""Reading a source tree: walk, git status, grep, and each file opened and read."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from ..contestants.native import sync_file_system
from ..field.contestant import Cannot
from ..field.race import Turn, Workload
from ..field.sizes import Size
from . import tree

NOT_CONTENT = frozenset({".git", ".branching", ".branchfs_ctl"})
"""git's, and what one contestant or another shows beside the content."""


def _base(directory: Path, size: Size) -> None:
    tree.make(directory, size.tree_files)


def _walk(directory: Path) -> int:
    """Lists and stats everything but what is git's or a store; returns how many files there are."""
    count = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name in NOT_CONTENT:
                continue
            entry.stat(follow_symlinks=False)
            count += _walk(Path(entry.path)) if entry.is_dir(follow_symlinks=False) else 1
    return count


def _forget_caches(directory: Path) -> None:
    sync_file_system(directory)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError as error:
        raise Cannot(f"only root can empty the caches: {error.strerror}") from error


def _work(turn: Turn) -> None:
    branch = turn.branch()
    files = turn.size.tree_files
    _forget_caches(turn.contestant.base)
    for row in ("walk, cold", "walk, warm"):
        with turn.timed(row):
            found = _walk(branch)
        turn.expect(found, files, "files seen")
    paths = [branch / name for name in tree.names(files)]
    for row in ("open and read a file of 2 KiB, cold", "open and read a file of 2 KiB, warm"):
        with turn.timed(row, times=files):
            for path in paths:
                descriptor = os.open(path, os.O_RDONLY)
                os.read(descriptor, 4096)
                os.close(descriptor)
    search = ["rg", "-c", "needle"] if shutil.which("rg") else ["grep", "-rlw", "needle"]
    with turn.timed(f"{search[0]}, warm"):
        done = subprocess.run(
            [*search, "."], cwd=branch, capture_output=True, text=True, check=True
        )
    found = sum(".txt" in line for line in done.stdout.splitlines())
    turn.expect(found, files, "files with a match")
    fresh = turn.branch("second")
    for row in ("git status, first in a fresh branch", "git status, second"):
        with turn.timed(row):
            done = subprocess.run(
                ["git", "status", "--porcelain"],
                cwd=fresh,
                capture_output=True,
                text=True,
                check=True,
            )
        said = [line for line in done.stdout.splitlines() if line[3:] not in NOT_CONTENT]
        turn.expect(said, [], "git's list of changes is")


READING = Workload(name="reading a source tree", base=_base, work=_work, only_reads=True)
