"""Cancellation of running work, at any time and from any thread.

A scope is a flag and a list of callbacks. A context variable has the current scope. Code that
starts work registers a callback that stops it (`on_cancel`); `cancel` calls the callbacks. So
Ctrl-C cancels a pattern, the pattern its candidates, a candidate a nested pattern, and that one its
process. Each knows only the next one.

`cancel` does not wait. It may be repeated with a shorter grace period.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

STOP_GRACE_SECONDS = 1.0
"""Time between SIGTERM and SIGKILL after a timeout or an interrupt, in seconds."""

_current: contextvars.ContextVar[CancelScope | None] = contextvars.ContextVar("scope", default=None)


class CancelScope:
    """One thing that can be cancelled."""

    def __init__(self) -> None:
        # Reentrant, for a signal handler may cancel the scope of the thread that it interrupts.
        self._lock = threading.RLock()
        self._callbacks: list[Callable[[float], None]] = []
        self._grace: float | None = None

    @staticmethod
    def current() -> CancelScope | None:
        """Returns the scope that governs the calling code."""
        return _current.get()

    @property
    def is_cancelled(self) -> bool:
        return self._grace is not None

    def cancel(self, grace_seconds: float = 0.0) -> None:
        """Asks everything registered to end, and everything registered later."""
        with self._lock:
            self._grace = grace_seconds
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback(grace_seconds)

    def on_cancel(self, callback: Callable[[float], None]) -> None:
        """Registers a callback that receives the grace period in seconds.

        If the scope is cancelled already, the callback is called immediately.
        """
        with self._lock:
            self._callbacks.append(callback)
            grace = self._grace
        if grace is not None:
            callback(grace)

    def forget(self, callback: Callable[[float], None]) -> None:
        """Takes back a registration: what it would stop has ended."""
        with self._lock:
            self._callbacks.remove(callback)

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls `function` under this scope, with the caller's other context variables."""
        context = contextvars.copy_context()
        context.run(_current.set, self)
        return context.run(function, *args, **kwargs)
