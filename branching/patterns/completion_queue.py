"""The queue from the worker threads of a call to the thread that owns it, with the time limit.

Worker threads post closures, and the owner runs them whenever it waits. No lock is held across a
commit, and only one thread changes state. The time limit is wall-clock time from the creation of
the queue.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable


class CompletionQueue:
    """The queue of one call. Any thread may call `post`; only the owner calls other methods."""

    def __init__(self, timeout: float | None) -> None:
        self._deadline = math.inf if timeout is None else time.monotonic() + timeout
        self._messages: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.is_cancelled = False
        """Whether the call was cancelled. Nothing may be committed then."""
        self.is_out_of_time = False
        """Whether the time limit expired during a wait."""

    def post(self, message: Callable[[], None]) -> None:
        """Adds a closure for the owner to run."""
        self._messages.put(message)

    def act(self) -> None:
        """Waits for one closure, without a time limit, and runs it."""
        self._messages.get()()

    def act_in_time(self, until: float = math.inf) -> bool:
        """Waits for one closure and runs it, until the time `until` or the time limit.

        Returns:
            False if none arrived in time.
        """
        remaining = max(0.0, min(self._deadline, until) - time.monotonic())
        try:
            message = self._messages.get(timeout=min(remaining, threading.TIMEOUT_MAX))
        except queue.Empty:
            self.is_out_of_time = time.monotonic() >= self._deadline
            return False
        message()
        return True

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the time limit expires; None for no limit."""
        left = self._deadline - time.monotonic()
        return None if left == math.inf else max(0.0, left)

    @property
    def is_over(self) -> bool:
        """Whether the time limit has expired or the call was cancelled. Nothing more may start."""
        return self.is_cancelled or self.is_out_of_time or time.monotonic() >= self._deadline
