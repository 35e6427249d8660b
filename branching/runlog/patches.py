"""The patch of a branch, saved beside its log when the branch ends.

    STORE/logs/speculate-1a2b3c4d-0.patch     changes of the candidate, for `git apply`

It has at most PATCH_BYTES_MAX bytes, or WHOLE_PATCH_BYTES_MAX if no other copy of the work exists.
The last line of a truncated patch says so. BranchFS writes the patch into a pipe and stops when the
pipe is closed, so that a branch with large changes takes no longer.
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
"""Maximum size for a winner, whose version of conflicting files exists nowhere else, and for
branches that were dropped without a decision of the user."""
SUFFIX = ".patch"
CUT = "[patch truncated at {} bytes]\n"


def patch_of(branch: Branch, bytes_max: int = PATCH_BYTES_MAX) -> bytes:
    """Returns the patch of an open branch, empty if nothing was changed.

    Args:
        branch: The branch.
        bytes_max: Maximum size. A longer patch is truncated at a line end.

    Raises:
        BranchingError: The branch no longer exists, or cannot be read.
    """
    reading, writing = os.pipe()
    parts: list[bytes] = []

    def collect() -> None:
        size = 0
        while size <= bytes_max and (part := os.read(reading, 1 << 16)):
            parts.append(part)
            size += len(part)
        os.close(reading)  # further writes fail with EPIPE

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
    """Returns the saved patch of a branch, or None if none was saved.

    Raises:
        OSError: The patch exists and cannot be read.
    """
    try:
        return read(logs / f"{branch}{SUFFIX}")
    except FileNotFoundError:
        return None
