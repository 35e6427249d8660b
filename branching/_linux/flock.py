"""File locks (flock): how processes see which others are alive, and take turns.

The kernel releases the locks of a process when it ends, however it ends. A lock belongs to the open
file: a forked process shares it, a second open of the same file does not.

    lock, try_lock, unlock   an open file
    open_lock                a lock file that its last holder removes
    has_holder               asks only

All locks of the library are taken here. What they mean stands where they are taken: `fs.automount`
(a mount is in use), `fs.in_use` (a branch is), `fs.branch_leases` (the program that is to end a
branch is alive), `process.cgroup.cgroup_dir` (the same of a control group), `cli.fork_registry` and
`tui.chat.fork_registry` (of a fork), `cluster.base_cache` (a base is in use), `fs.checkpoints` (the
checkpoints are being changed).
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

POLL_SECONDS = 0.01


def lock(file: int, *, is_shared: bool = False) -> None:
    """Locks an open file; waits for other holders.

    Args:
        file: The descriptor. Closing it releases the lock.
        is_shared: Allow other shared locks beside it.
    """
    fcntl.flock(file, fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX)


def try_lock(file: int, *, is_shared: bool = False) -> bool:
    """Locks an open file if no other holder prevents it. Does not wait.

    A shared lock that the file has already becomes exclusive, or stays as it is.

    Returns:
        False if another process, or another open of this one, has it locked.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(file: int) -> None:
    """Releases the lock, also for processes forked meanwhile, which have the file open, too."""
    fcntl.flock(file, fcntl.LOCK_UN)


def has_holder(file: int) -> bool:
    """Returns whether a process holds an exclusive lock on an open file.

    The test takes a shared lock, so concurrent callers do not see each other as holders. It stays
    until the file is closed.
    """
    return not try_lock(file, is_shared=True)


def is_at(file: int, path: Path) -> bool:
    """Returns whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False


def open_lock(
    opened: Callable[[], int],
    path: Path,
    *,
    is_shared: bool = False,
    seconds_max: float | None = None,
) -> int:
    """Opens and locks a file that others may remove before it is locked.

    Args:
        opened: Opens or creates the file at `path`; called again if it was removed.
        path: Where the file is.
        is_shared: Allow other shared locks beside it.
        seconds_max: How long to wait for other holders. Default: any time.

    Returns:
        The descriptor of the file that has the name and the lock.

    Raises:
        BlockingIOError: Others hold it, and still did after `seconds_max`.
        OSError: `opened` failed.
    """
    deadline = None if seconds_max is None else time.monotonic() + seconds_max
    while True:
        file = opened()
        try:
            if deadline is None:
                lock(file, is_shared=is_shared)
            is_held = deadline is not None and not try_lock(file, is_shared=is_shared)
            if not is_held and is_at(file, path):
                return file
            if is_held and deadline is not None and time.monotonic() > deadline:
                raise BlockingIOError(f"{path} is locked")
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        if is_held:
            time.sleep(POLL_SECONDS)
