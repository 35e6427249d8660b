"""A commit that was interrupted, seen without mounting the directory."""

from __future__ import annotations

import os
from pathlib import Path

from branching.fs.flock import is_locked
from branching.fs.store_files import check_plain, open_directory


def is_interrupted(base: Path) -> bool:
    """Returns whether a commit (or undo, or redo) to `base` was interrupted and is not recovered.

    Its entry is in the journal, and no daemon or recovery has locked the store. False where this
    user may not look into the store.
    """
    store = base.resolve() / ".branching"
    try:
        journal = open_directory(store / "journal")
        try:
            entries = os.listdir(journal)  # noqa: PTH208  (it is a descriptor)
        finally:
            os.close(journal)
        return bool(entries) and not is_locked(store / "lock")
    except OSError:
        return False


def log_of(base: Path) -> Path | None:
    """Returns the log of the daemon of `base`, if there is one."""
    base = base.resolve()
    home = base / ".branching"
    stores = [home]
    try:
        elsewhere = (home / "store").readlink()
        if (elsewhere / "base").readlink() == base:  # the two parts of a store name each other
            stores.insert(0, elsewhere)
    except OSError:
        pass
    for store in stores:
        log = store / "branchfs.log"
        try:
            check_plain(log)
        except OSError:
            continue
        return log
    return None
