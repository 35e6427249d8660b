"""Waits for conditions that other processes bring about."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS_MAX = 120.0
UNCHANGED_SECONDS = 0.3


def until(condition: Callable[[], object], what: str, *, seconds_max: float = SECONDS_MAX) -> None:
    """Waits until the condition holds."""
    deadline = time.monotonic() + seconds_max
    while not condition():
        assert time.monotonic() < deadline, f"not so after {seconds_max:g} s: {what}"
        time.sleep(0.01)


def until_unchanged(read: Callable[[], str], what: str) -> None:
    """Waits until two readings, some time apart, are equal."""

    def is_unchanged() -> bool:
        before = read()
        time.sleep(UNCHANGED_SECONDS)
        return before == read()

    until(is_unchanged, what)
