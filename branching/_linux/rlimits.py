"""The limit on open files of this process and its children.

A running command needs about seven descriptors here, so hundreds of commands need more than the
usual soft limit of 1024. A process can raise its soft limit up to the hard limit. Its children must
not inherit the higher limit: some programs fail with descriptors above 1024, others close all
possible descriptors at start.
"""

from __future__ import annotations

import resource

OPEN_FILES_ENOUGH = 65_536
"""Enough for ten thousand concurrent commands."""

_before: tuple[int, int] | None = None


def raise_open_files() -> None:
    """Raises the soft limit to the hard limit, for the whole process. Only for our own programs."""
    global _before  # noqa: PLW0603
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_ENOUGH if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    _before = _before or (soft, hard)


def restore_open_files(pid: int) -> None:
    """Sets the limits of a process that was just started to the earlier ones of this process."""
    if _before is not None:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, _before)


def open_files_before() -> tuple[int, int] | None:
    """Returns the soft and hard limits for child processes; None if they were not raised.

    No limit is 2**64 - 1, as in the kernel.
    """
    return None if _before is None else (_before[0] % (1 << 64), _before[1] % (1 << 64))
