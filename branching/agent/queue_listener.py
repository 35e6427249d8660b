"""A listener whose work blocks (it writes files), for an event loop: a thread does it, in order."""

from __future__ import annotations

import queue
import threading

from branching.runlog.events import Event, OnEvent

CLOSING_SECONDS_MAX = 10.0
"""A disk that hangs must not keep a program from ending."""


class QueueListener:
    """Takes events at once and hands them on. To be closed, or the last ones may be lost."""

    def __init__(self, listener: OnEvent) -> None:
        self._listener = listener
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        """Takes an event. In the event loop's thread alone."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="behind", daemon=True)
            self._thread.start()
        self._events.put(event)

    def close(self) -> None:
        """Returns when all has been handed on, or that takes too long."""
        if self._thread is not None:
            self._events.put(None)
            self._thread.join(CLOSING_SECONDS_MAX)
            self._thread = None

    def _work(self) -> None:
        while (event := self._events.get()) is not None:
            self._listener(event)
