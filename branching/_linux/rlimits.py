"""How many files this program, and what it starts, may have open.

A command that runs takes about seven of ours: hundreds of them need more than the 1024 that most
systems give a program at first. A program may give itself more, up to a hard limit; but what it
starts must not inherit that: some programs break above 1024, others close all they might have.
"""

from __future__ import annotations

import resource

OPEN_FILES_ENOUGH = 65_536
"""For ten thousand commands at once; no use in asking for more."""

_before: tuple[int, int] | None = None


def raise_open_files() -> None:
    """Lets this program have as many as it may. For programs that are ours: it holds for all of
    the process."""
    global _before  # noqa: PLW0603
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_ENOUGH if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    _before = _before or (soft, hard)


def restore_open_files(pid: int) -> None:
    """Gives a process that was just started what we had before."""
    if _before is not None:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, _before)
