"""The patch of a branch, kept beside its log when the branch ends.

    STORE/logs/speculate-1a2b3c4d-0.patch     what the candidate changed, as `git apply` takes it

It has at most PATCH_BYTES_MAX bytes, or WHOLE_PATCH_BYTES_MAX where nothing else is left of the
work; what is left out is said in its last line. BranchFS writes it
into a pipe and stops when the pipe is closed, so that a branch with much in it costs no more than
that.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from branching.errors import BranchingError
from branching.fs.store_files import read

if TYPE_CHECKING:
    from branching.fs import Branch

PATCH_BYTES_MAX = 256 << 10
WHOLE_PATCH_BYTES_MAX = 64 << 20
"""Of a winner, whose version of files in conflict is in no other place, and of branches that were
dropped although nobody decided so."""
SUFFIX = ".patch"
CUT = "[the rest is left out: a patch that is kept has {} bytes]\n"


def patch_of(branch: Branch, bytes_max: int = PATCH_BYTES_MAX) -> bytes:
    """Returns the patch of an open branch, cut at so many bytes; empty if nothing was changed.

    Raises:
        BranchingError: The branch is gone, or cannot be read.
    """
    reading, writing = os.pipe()
    parts: list[bytes] = []

    def collect() -> None:
        size = 0
        while size <= bytes_max and (part := os.read(reading, 1 << 16)):
            parts.append(part)
            size += len(part)
        os.close(reading)  # who writes on gets EPIPE

    collector = threading.Thread(target=collect, name="patch", daemon=True)
    collector.start()
    error: BranchingError | None = None
    with os.fdopen(writing, "wb", buffering=0) as file:
        try:
            branch.patch(file)
        except BranchingError as raised:
            error = raised
    collector.join()
    patch = b"".join(parts)
    if len(patch) > bytes_max:
        return patch[: patch.rfind(b"\n", 0, bytes_max) + 1] + CUT.format(bytes_max).encode()
    if error is not None:
        raise error
    return patch


def read_patch(logs: Path, branch: str) -> bytes | None:
    """Returns the patch that was kept of a branch, None if none was.

    Raises:
        OSError: There is one, and it cannot be read.
    """
    try:
        return read(logs / f"{branch}{SUFFIX}")
    except FileNotFoundError:
        return None
