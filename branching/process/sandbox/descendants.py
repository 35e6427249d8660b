"""All descendants of this process: what stands in for a process namespace where there is none.

Orphans come to us (we are their reaper), so nobody below us is out of sight. But one who forks
faster than we look may live a little longer, and who becomes another user cannot be ended at all.
"""

from __future__ import annotations

import os
import signal
import time

KILL_SECONDS_MAX = 5.0


def signal_all(number: int) -> None:
    """Signals each of them."""
    for pid in _of(os.getpid()):
        try:
            os.kill(pid, number)
            if number != signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)  # a stopped process hears it too
        except (ProcessLookupError, PermissionError):
            continue


def kill_all() -> None:
    """Kills them until there are none, or for a bounded time."""
    deadline = time.monotonic() + KILL_SECONDS_MAX
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return  # who has no child has no descendant: orphans would be ours
        signal_all(signal.SIGKILL)
        time.sleep(0.001)


def _of(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                words = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        parents.setdefault(int(words[1]), []).append(int(name))
    found = []
    waiting = [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found
