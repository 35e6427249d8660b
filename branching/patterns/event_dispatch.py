"""Dispatches events from several threads to a listener, one at a time.

After the listener raises, it receives no more events. Its exception is stored in `error`, and the
thread that owns the call is woken to raise it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from branching.patterns.attempt import Attempt
from branching.runlog.events import EventKind, OnEvent, takes_blocks


class EventDispatcher:
    """Passes events to `listener`, if there is one."""

    def __init__(self, listener: OnEvent | None, wake: Callable[[], None]) -> None:
        self._listener = listener
        self._wake = wake
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def say(self, attempt: Attempt, block: str) -> None:
        """Reports whole lines of output: in one event if the listener takes blocks, else singly."""
        if self._listener is None:
            return
        if takes_blocks(self._listener):
            self.tell(attempt, "output", block)
            return
        for line in block.split("\n"):
            self.tell(attempt, "output", line)

    def finished(self, attempt: Attempt) -> None:
        """Reports that an attempt has ended, with the reason if it failed."""
        self.tell(attempt, "finished", attempt.reason)

    def fail(self, error: BaseException) -> None:
        """Ends the call with the exception of a callback that ran on another machine."""
        with self._lock:
            self.error = self.error or error
        self._wake()

    def tell(
        self,
        attempt: Attempt,
        kind: EventKind,
        text: str = "",
        score: float | None = None,
        loser: int | None = None,
    ) -> None:
        if self._listener is None:
            return
        event = attempt.event(kind, text, score=score, loser=loser)
        with self._lock:
            if self.error is not None:
                return
            try:
                self._listener(event)
            except BaseException as error:  # the thread that owns the call raises it
                self.error = error
                self._wake()
