"""Processes that a branch's run has left behind: found by their environment, and killed.

What runs in a sandbox dies with it. What was started without one, and has left its session, still
has the variable that the branch's environment sets (`FORK_VARIABLE`). Who cleans its environment
on purpose escapes this; the file system refuses its writes all the same once the branch is gone.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from branching.errors import BranchError

KILL_SECONDS_MAX = 30.0
"""A killed process ends within milliseconds, unless it is blocked in the kernel."""
_POLL_SECONDS = 0.005


def kill_marked(variable: str, mark: str) -> int:
    """Kills all processes with `mark` among the words of `variable`; waits until they are gone.

    A mark that ends in `/` stands for all words that begin so. Returns how many there were.
    BranchError if one does not die.
    """
    deadline = time.monotonic() + KILL_SECONDS_MAX
    seen: set[int] = set()
    while marked := _marked(variable, mark):
        seen |= marked
        for pid in marked:
            _kill(pid, variable, mark)
        if time.monotonic() > deadline:
            raise BranchError(
                f"processes of the branch do not die: {', '.join(map(str, sorted(marked)))}",
                hint="its files are neither merged nor dropped; try again when they are gone",
            )
        time.sleep(_POLL_SECONDS)
    return len(seen)


def _marked(variable: str, mark: str) -> set[int]:
    own = os.getpid()
    return {
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and int(entry.name) != own and _is_marked(entry, variable, mark)
    }


def _is_marked(entry: Path, variable: str, mark: str) -> bool:
    name, word = os.fsencode(variable) + b"=", os.fsencode(mark)
    try:
        settings = (entry / "environ").read_bytes().split(b"\0")
    except OSError:
        return False  # it has ended, or is another user's
    words = [one for s in settings if s.startswith(name) for one in s[len(name) :].split()]
    return any(one.startswith(word) if mark.endswith("/") else one == word for one in words)


def _kill(pid: int, variable: str, mark: str) -> None:
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        # The number may be another process's by now; the handle is not.
        if _is_marked(Path("/proc", str(pid)), variable, mark):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        pass  # it has ended
    finally:
        os.close(handle)
