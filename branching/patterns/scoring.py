"""The score of a success, for patterns that rank.

It is the first of these that exists: the result of `evaluate(path)`, the score that the candidate
returned, its entry in a list of scores, 1.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from branching.patterns.attempt import Attempt
from branching.patterns.results import checked_score
from branching.patterns.runner import Runner, Stopped

Evaluate = Callable[[Path], float]


class Rating:
    """Ranks the attempts of one pattern by score."""

    def __init__(
        self, evaluate: Evaluate | None = None, scores: Sequence[float] | None = None
    ) -> None:
        self._evaluate = evaluate
        self._scores = None if scores is None else [checked_score(score) for score in scores]

    def best(self, runner: Runner, count: int) -> list[Attempt]:
        """Waits for the running attempts and returns the `count` best successes, best first.

        Attempts with equal scores are in candidate order. An attempt that can no longer be among
        the best is dropped immediately, which limits the number of open branches. If the time
        limit ends the wait, the best attempts rated by then are returned.
        """
        best: list[Attempt] = []
        try:
            for attempt in runner.finished():
                if attempt.succeeded:
                    self._rate(runner, attempt)
                if not attempt.is_rated:
                    runner.drop(attempt)
                    continue
                best.append(attempt)
                best.sort(key=lambda attempt: (-attempt.score, attempt.index))
                if len(best) > count:
                    runner.drop(best.pop())
        except Stopped:
            if runner.is_cancelled:
                raise
        return best

    def _rate(self, runner: Runner, attempt: Attempt) -> None:
        if self._evaluate is not None:
            value = runner.consult(attempt, self._evaluate, attempt.path)
            try:
                runner.rate(attempt, checked_score(value))
            except ValueError as error:
                runner.fail(attempt, error)
        elif attempt.answer.score is not None:
            runner.rate(attempt, attempt.answer.score)
        else:
            runner.rate(attempt, 1.0 if self._scores is None else self._scores[attempt.index])
