"""Lending the terminal to a command, as a shell does.

A command that shares our terminal runs in a process group of its own in our session. The terminal
is given to that group, so Ctrl-C and Ctrl-Z reach the command and not us, and taken back when it
ends. Stopped by Ctrl-Z it takes us along, and `fg` wakes both.
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
    """The terminal on standard input, while our process group is the one in front."""

    is_own = False

    def __init__(self, descriptor: int) -> None:
        self.number = descriptor
        """The descriptor of the command's that is this terminal."""
        self._group = os.getpgrp()

    @staticmethod
    def ours() -> JobControl | None:
        """Returns the terminal on standard input, or None: no terminal, or we are in the back."""
        try:
            in_front = os.tcgetpgrp(0) == os.getpgrp()
        except OSError:
            return None
        return JobControl(0) if in_front else None

    @staticmethod
    def popen_options() -> dict[str, Any]:
        """Returns what makes subprocess start a group of its own in our session."""
        if sys.version_info >= (3, 11):
            return {"process_group": 0}
        # The one place for a preexec_fn: 3.10 has no other way, and setpgrp is a bare system call.
        return {"preexec_fn": os.setpgrp}

    def give(self, group: int) -> None:
        """Puts the group in front, and wakes it in case it asked for the terminal too early."""
        self._set_front(group)
        os.killpg(group, signal.SIGCONT)  # it exists at least as a zombie: we have not reaped it

    def take_back(self) -> None:
        """Puts our own group in front again."""
        self._set_front(self._group)

    def follow_stop(self, leader: int) -> None:
        """If the leader of the group was stopped: stop with it, and go on with it."""
        stopped = os.waitid(os.P_PID, leader, os.WSTOPPED | os.WNOHANG)
        if stopped is None:
            return
        self.stop_along(leader)
        os.killpg(leader, signal.SIGCONT)

    def stop_along(self, leader: int) -> None:
        """Stops our own group, for the group of `leader` was; once woken, puts that in front."""
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
    """Stops our process group, and returns when it goes on; at once in a session without a shell
    above us: nobody could wake us there, and the kernel drops the signal.
    """
    # Held off this thread it goes to the main one, and we see when that has taken it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})
    try:
        os.killpg(os.getpgrp(), signal.SIGTSTP)
        while signal.SIGTSTP in signal.sigpending():
            time.sleep(_STOP_SECONDS)
        time.sleep(_STOP_SECONDS)  # all threads are stopped in here
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def without_stops() -> Iterator[None]:
    """Who is not in front is stopped for using the terminal, unless these are blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTIN, signal.SIGTTOU})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
