"""What the threads of one call have to say to the thread that owns it, and how long it listens.

They post closures, and it runs them while it waits for anything. So there is no lock to hold across
a commit, and no state that two threads could see differently. The time limit is wall clock, from
the making of the mailbox.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable


class CompletionQueue:
    """One call's. Any thread may post; the rest is for the one that owns the call."""

    def __init__(self, timeout: float | None) -> None:
        self._deadline = math.inf if timeout is None else time.monotonic() + timeout
        self._messages: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.is_cancelled = False
        """Somebody asked for the end: nothing may be committed any more."""
        self.is_out_of_time = False
        """The time was over when something was still waited for."""

    def post(self, message: Callable[[], None]) -> None:
        """Hands over what is to be done."""
        self._messages.put(message)

    def act(self) -> None:
        """Waits for one message, however long, and acts on it."""
        self._messages.get()()

    def act_in_time(self, until: float = math.inf) -> bool:
        """Does the same, until then or until the time is over. False if nothing came."""
        remaining = max(0.0, min(self._deadline, until) - time.monotonic())
        try:
            message = self._messages.get(timeout=min(remaining, threading.TIMEOUT_MAX))
        except queue.Empty:
            self.is_out_of_time = time.monotonic() >= self._deadline
            return False
        message()
        return True

    def lift_deadline(self) -> None:
        """What follows may take as long as it likes."""
        self._deadline = math.inf
        self.is_out_of_time = False

    @property
    def seconds_left(self) -> float | None:
        """How long until the time is over; None without a limit."""
        left = self._deadline - time.monotonic()
        return None if left == math.inf else max(0.0, left)

    @property
    def is_over(self) -> bool:
        """The time is over, or the call was cancelled: nothing more should be started."""
        return self.is_cancelled or self.is_out_of_time or time.monotonic() >= self._deadline
