"""The directories that benchmarks begin with: source trees of small files, under git."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

FILES_PER_DIRECTORY = 40
FILE_BYTES = 2048
LONG_AGO = 1_500_000_000
"""What is as young as its index git reads again, to be sure."""
_WORDS = ("branch", "commit", "layer", "upper", "lower", "inode", "needle", "handle", "request")


def names(count: int) -> list[str]:
    """Returns the paths of `count` files, two directories deep."""
    return [
        f"d{i // FILES_PER_DIRECTORY // 20}/d{i // FILES_PER_DIRECTORY}/file{i}.txt"
        for i in range(count)
    ]


def make(directory: Path, count: int, *, git: bool = True) -> None:
    """Fills `directory` with `count` files of about 2 KiB, the same each time, committed to git."""
    chance = random.Random(1)
    for name in names(count):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = ""
        while len(text) < FILE_BYTES:
            text += " ".join(chance.choices(_WORDS, k=10)) + "\n"
        path.write_text(text)
        os.utime(path, (LONG_AGO, LONG_AGO))
    if git:
        identity = ("-c", "user.name=bench", "-c", "user.email=bench@localhost", "-c", "gc.auto=0")
        for command in (
            ("init", "-q"),
            ("add", "-A"),
            ("commit", "-q", "--allow-empty", "-m", "x"),
        ):
            subprocess.run(
                ["git", *identity, *command], cwd=directory, check=True, capture_output=True
            )
