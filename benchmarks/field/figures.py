"""Numbers out of runs: the least, the median, the most, and how many runs there were.

A ratio is taken run by run, each contestant's sample over native's of the same run, so that a disk
that was slow for a minute is in both. One run says nothing about how far two runs would lie apart:
of one run there is no ratio.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

RUNS_MIN = 2


class TooFewRuns(ValueError):
    """A ratio was asked of fewer runs than two."""


@dataclass(frozen=True)
class Spread:
    """The least, the median and the most of some runs."""

    minimum: float
    median: float
    maximum: float
    runs: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Returns the spread of `samples`; raises ValueError of none."""
        if not samples:
            raise ValueError("there is no spread of no runs")
        return cls(min(samples), statistics.median(samples), max(samples), len(samples))


def ratios(samples: Sequence[float], native: Sequence[float]) -> Spread:
    """Returns the spread of `samples` over `native`, run by run.

    Raises TooFewRuns of one run, and ValueError where the runs are not the same or took no time.
    """
    if len(samples) != len(native):
        raise ValueError(f"{len(samples)} runs cannot be compared with {len(native)} of native")
    if len(samples) < RUNS_MIN:
        raise TooFewRuns(f"a ratio takes {RUNS_MIN} runs or more, not {len(samples)}")
    if min(native) <= 0:
        raise ValueError("native took no time: the work is too small to be compared")
    return Spread.of([sample / other for sample, other in zip(samples, native, strict=True)])
