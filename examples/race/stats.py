"""A function with a bug: the race repairs it."""

from collections.abc import Sequence


def mean(numbers: Sequence[float]) -> float:
    """Return the arithmetic mean of `numbers`."""
    return sum(numbers) // len(numbers)
