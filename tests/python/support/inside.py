"""Prints the descriptors, variables and mounts of this process. Run inside a sandbox, as a program
(`python inside.py`) or by its source, so that it names nothing of the test's.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

SOURCE = Path(__file__)


def look() -> dict[str, Any]:
    """Returns all that this process has."""
    descriptors = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            descriptors[name] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
        except OSError:
            continue  # the directory that was listed
    environ = Path("/proc/self/environ").read_bytes().split(b"\0")
    mounts = {}
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        words = line.split()
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), words[4])
        mounts[point] = words[5].split(",")[0]
    return {
        "descriptors": descriptors,
        "initial environment": sorted(os.fsdecode(word) for word in environ if word),
        "environment": dict(os.environ),
        "mounts": mounts,
    }


def count_in_memory(pattern: bytes) -> int:
    """Counts the matches in the memory that this process may write. The pattern itself is there."""
    found = 0
    for begin, end in re.findall(
        r"^([0-9a-f]+)-([0-9a-f]+) rw", Path("/proc/self/maps").read_text(), re.MULTILINE
    ):
        with Path("/proc/self/mem").open("rb", buffering=0) as memory:
            try:
                memory.seek(int(begin, 16))
                data = memory.read(int(end, 16) - int(begin, 16))
            except OSError:
                continue  # the kernel's own pages
            found += sum(1 for _ in re.finditer(pattern, data))
    return found


if __name__ == "__main__":
    print(json.dumps(look()))
