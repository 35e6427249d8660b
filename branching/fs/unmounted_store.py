"""Reads the state of a store whose workspace is not mounted."""

from __future__ import annotations

import os
from pathlib import Path

from branching.fs.store_files import check_plain, is_locked, open_directory


def is_interrupted(base: Path) -> bool:
    """Returns whether a commit, undo or redo was interrupted and has not been recovered.

    That is so if the journal has an entry while no daemon has locked the store.

    Args:
        base: The directory that is branched.

    Returns:
        False also if this user cannot read the store.
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
    """Returns the path of the log of the daemon for `base`, None if there is none."""
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
