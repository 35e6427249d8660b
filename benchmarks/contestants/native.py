"""The plain directory: the limit that everybody is measured against.

Its branch is the base itself, which the race copied for it outside of the clock. Its commit is the
bare renames that put prepared files in place, and one sync: no promise of all or nothing.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from ..field.contestant import Cannot, Contestant


def sync_file_system(directory: Path) -> None:
    """Writes one file system out; os.sync would wait for all others too."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(directory))
    finally:
        os.close(descriptor)


class Native(Contestant):
    name = "native"

    def create(self, name: str, parent: str | None = None) -> str:
        raise Cannot("it has no branches")

    def path(self, branch: str) -> Path:
        return self.base

    def renames(self, prepared: Path) -> None:
        """Renames each file of the flat directory `prepared` into the base, then syncs."""
        for name in os.listdir(prepared):  # noqa: PTH208 # names, as cheaply as can be
            os.rename(prepared / name, self.base / name)  # noqa: PTH104
        sync_file_system(self.base)
