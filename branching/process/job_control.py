"""Job control for a command on this process's terminal, as in a shell.

The command runs in its own process group in our session. That group becomes the foreground group of
the terminal, so Ctrl-C and Ctrl-Z reach the command only. When the command ends, our group becomes
the foreground group again. If Ctrl-Z stops the command, our group stops too, and `fg` continues
both.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_STOP_SECONDS = 0.005


class JobControl:
    """The terminal on standard input, while our process group is its foreground group."""

    is_own = False

    def __init__(self, descriptor: int) -> None:
        self.number = descriptor
        """The command's descriptor of the terminal."""
        self._group = os.getpgrp()

    @staticmethod
    def ours() -> JobControl | None:
        """Returns the terminal on standard input, None without one or in the background."""
        try:
            in_front = os.tcgetpgrp(0) == os.getpgrp()
        except OSError:
            return None
        return JobControl(0) if in_front else None

    @staticmethod
    def popen_options() -> dict[str, Any]:
        """Returns the options of subprocess.Popen that start a new process group in our session."""
        if sys.version_info >= (3, 11):
            return {"process_group": 0}
        # The one place for a preexec_fn: 3.10 has no other way, and setpgrp is a bare system call.
        return {"preexec_fn": os.setpgrp}

    def give(self, group: int) -> None:
        """Makes `group` the foreground group, and continues it if it was stopped before."""
        self._set_front(group)
        os.killpg(group, signal.SIGCONT)  # it exists at least as a zombie: we have not reaped it

    def take_back(self) -> None:
        """Makes our own group the foreground group again."""
        self._set_front(self._group)

    def follow_stop(self, leader: int) -> None:
        """If the leader of the group was stopped, stops our group; then continues the leader."""
        stopped = os.waitid(os.P_PID, leader, os.WSTOPPED | os.WNOHANG)
        if stopped is None:
            return
        self.stop_along(leader)
        os.killpg(leader, signal.SIGCONT)

    def stop_along(self, leader: int) -> None:
        """Stops our own group. When continued, makes the group of `leader` the foreground group."""
        self.take_back()
        stop_own_group()
        if os.tcgetpgrp(self.number) == self._group:
            self._set_front(leader)

    def _set_front(self, group: int) -> None:
        with without_stops():
            try:
                os.tcsetpgrp(self.number, group)
            except OSError:
                pass  # the terminal is gone (hung up): the command will see that itself


def stop_own_group() -> None:
    """Stops our process group, and returns when it is continued.

    Returns immediately if the group is orphaned (no shell could continue it): the kernel then
    ignores the signal.
    """
    os.killpg(os.getpgrp(), signal.SIGTSTP)
    time.sleep(_STOP_SECONDS)  # another thread may have got it: all are stopped in here


@contextmanager
def without_stops() -> Iterator[None]:
    """Blocks SIGTTIN and SIGTTOU, which stop a background process that uses the terminal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTIN, signal.SIGTTOU})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
