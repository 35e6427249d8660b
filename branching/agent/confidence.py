"""The confidence in a judge's choice, computed from the branches.

    heuristic   0.4 quality_spread + 0.4 test_pass_ratio + 0.2 internal_consistency
    effective   heuristic x the judge's own confidence, between 0 and 1

The three signals:

    quality_spread        1 - agreement score: the share of the touched paths in which they differ
    test_pass_ratio       of the winner's test run; None without one, which counts as 0 and limits
                          the heuristic to 0.65
    internal_consistency  1 - (retries + stuck loops) / turns of the winner, between 0 and 1

With these weights, branches that do not differ reach at most 0.6, whatever their test results. A
threshold of 0.8 then always asks a person. Other rules can be set by weights, more signals, or a
formula: `Confidence(weights={...}, signals={"small_diff": measure})`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from branching.agent.types import BranchOutcome, ConfidenceSignals

WEIGHTS: Mapping[str, float] = {
    "quality_spread": 0.4,
    "test_pass_ratio": 0.4,
    "internal_consistency": 0.2,
}
UNTESTED_MAX = 0.65
"""The most that the heuristic can be where nothing was tested."""

Measure = Callable[[BranchOutcome], float]
"""A signal of the caller's own: given the winner's outcome, a number between 0 and 1."""
Formula = Callable[[ConfidenceSignals, float], float]
"""The effective confidence, from the signals and the judge's own confidence."""


@dataclass(frozen=True, kw_only=True)
class Confidence:
    """A rule for the effective confidence."""

    weights: Mapping[str, float] = field(default_factory=lambda: dict(WEIGHTS))
    """By the signal's name; what a measure of the caller's own counts must stand here too."""
    untested_max: float = UNTESTED_MAX
    signals: Mapping[str, Measure] = field(default_factory=dict)
    formula: Formula | None = None
    """Takes the place of all the others."""

    def __post_init__(self) -> None:
        unknown = set(self.weights) - set(WEIGHTS) - set(self.signals)
        if unknown:
            raise ValueError(f"weights for unknown signals: {sorted(unknown)}")

    def heuristic(self, signals: ConfidenceSignals) -> float:
        """Returns the weighted sum of the signals."""
        values: dict[str, float] = {
            "quality_spread": signals.quality_spread,
            "test_pass_ratio": signals.test_pass_ratio or 0.0,
            "internal_consistency": signals.internal_consistency,
            **signals.custom,
        }
        total = sum(weight * values.get(name, 0.0) for name, weight in self.weights.items())
        return min(total, self.untested_max) if signals.test_pass_ratio is None else total

    def effective(self, signals: ConfidenceSignals, judged: float) -> float:
        """Returns how sure one may be, between 0 and 1, given the judge's own confidence."""
        if self.formula is not None:
            return clamp01(self.formula(signals, judged))
        return clamp01(self.heuristic(signals) * judged)

    def signals_of(self, winner: BranchOutcome, agreement_score: float) -> ConfidenceSignals:
        """Returns the signals of a winner. ValueError for a measure that gives no number."""
        return ConfidenceSignals(
            quality_spread=quality_spread(agreement_score),
            test_pass_ratio=winner.test_pass_ratio,
            internal_consistency=internal_consistency(
                winner.turns, winner.retry_count, winner.stuck_loop_hits
            ),
            custom={name: clamp01(measure(winner)) for name, measure in self.signals.items()},
        )


def compute_confidence(signals: ConfidenceSignals, judge_confidence: float) -> float:
    """Returns the effective confidence by the default rule, between 0 and 1."""
    return Confidence().effective(signals, judge_confidence)


def quality_spread(agreement_score: float) -> float:
    """Returns how much the branches differ: 1 if in all that was touched, 0 if in nothing."""
    return clamp01(1.0 - agreement_score)


def internal_consistency(turns: int, retries: int, stuck_loop_hits: int) -> float:
    """Returns how smoothly a branch ran: 1 without a retry, 0 with as many as it had turns."""
    return clamp01(1.0 - (retries + stuck_loop_hits) / max(turns, 1))


def clamp01(value: float) -> float:
    """Returns the nearest number between 0 and 1. ValueError for NaN."""
    if value != value:  # noqa: PLR0124  (NaN)
        raise ValueError("a confidence must be a number, not NaN")
    return min(1.0, max(0.0, value))
