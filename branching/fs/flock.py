"""Locks of other processes, which the kernel takes away when these die, however they do."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from branching.fs.store_files import open_file


def is_locked(path: Path) -> bool:
    """Whether some process has locked a file for itself. OSError if that cannot be opened.

    Those who ask at the same time do not take each other for its holder.
    """
    lock = open_file(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
