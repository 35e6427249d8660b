"""A workspace on a full disk: messages, and how space is freed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.branchfs import find_program
from support.command import Done, branching

DISK_BYTES = 50 << 20
FILL = "head -c 100000000 /dev/zero >big"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@pytest.fixture
def project(outside: Path) -> Iterator[Path]:
    """A directory on a small separate file system."""
    image, disk = outside / "image", outside / "disk"
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    disk.mkdir()
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(disk)], check=True)
    try:
        base = disk / "project"
        base.mkdir()
        (base / "seed").write_text("before")
        yield base
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def run(project: Path, *words: str) -> Done:
    return branching(project, *words, BRANCHFS=str(find_program()))


def test_a_kept_branch_that_fills_the_disk_says_how_to_free_it(project: Path) -> None:
    done = run(project, "run", "-b", "full", "--on-error", "keep", "--", "sh", "-c", FILL)
    assert done.code == 1
    assert done.err.endswith(
        "Hint: the disk is full, and branch full keeps what was written; branching abort full "
        "drops it and frees the space\n"
    )
    assert shutil.disk_usage(project).free < 1 << 20
    # What works there next is not told of a program that was killed.
    for words in (["status"], ["diff", "full"]):
        done = run(project, *words)
        assert (done.code, done.err) == (0, ""), done
    done = run(project, "ls")
    assert (done.code, done.out.split()[:2]) == (0, ["full", "live"])
    # Its end takes a block of the disk, which may have been there.
    entry = json.loads((project / ".branching" / "logs" / "full.json").read_text())
    assert ("or the disk was full" in done.err) == (entry["state"] == "running"), (entry, done)
    assert run(project, "abort", "full").code == 0
    assert shutil.disk_usage(project).free > DISK_BYTES // 2
    done = run(project, "run", "-q", "--", "sh", "-c", "echo after >seed")
    assert (done.code, done.err) == (0, "")
    assert (project / "seed").read_text() == "after\n"


def test_a_branch_that_is_dropped_needs_no_hint(project: Path) -> None:
    done = run(project, "run", "--", "sh", "-c", FILL)
    assert (done.code, "Hint" in done.err) == (1, False)
    assert (project / "seed").read_text() == "before"
