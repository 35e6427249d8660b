"""A commit that was interrupted, seen without mounting the directory."""

from __future__ import annotations

from pathlib import Path

from branching.fs.locks import is_locked


def is_interrupted(base: Path) -> bool:
    """Returns whether a commit (or undo, or redo) to `base` was interrupted and is not recovered.

    Its entry is in the journal, and no daemon or recovery has locked the store. False where this
    user may not look into the store.
    """
    store = base / ".branching"
    try:
        return any((store / "journal").iterdir()) and not is_locked(store / "lock")
    except OSError:
        return False


def log_of(base: Path) -> Path | None:
    """Returns the log of the daemon of `base`, if there is one."""
    home = base / ".branching"
    for store in (home / "store", home):
        log = store / "branchfs.log"
        if log.is_file():
            return log
    return None
