"""Waiting for what other processes do: for a condition, never for a time alone."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS_MAX = 60.0
STILL_SECONDS = 0.3


def until(condition: Callable[[], object], what: str, *, seconds_max: float = SECONDS_MAX) -> None:
    """Waits until it is so."""
    deadline = time.monotonic() + seconds_max
    while not condition():
        assert time.monotonic() < deadline, f"not so after {seconds_max:g} s: {what}"
        time.sleep(0.01)


def until_still(read: Callable[[], str], what: str) -> None:
    """Waits until what is read stays the same for a while."""

    def stands_still() -> bool:
        before = read()
        time.sleep(STILL_SECONDS)
        return before == read()

    until(stands_still, what)
