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
        self.evaluate = evaluate
        self._scores = None if scores is None else [checked_score(score) for score in scores]

    def best(self, runner: Runner, count: int) -> list[Attempt]:
        """Waits for the running attempts and returns the `count` best successes, best first.

        Attempts with equal scores are in candidate order. An attempt that can no longer be among
        the best is dropped immediately, which limits the number of open branches. If the time
        limit ends the wait, the best attempts rated by then are returned. Their branches are here:
        a remote attempt that was lost with its node is replaced by the next best.
        """
        best: list[Attempt] = []
        is_limited = not runner.is_remote
        try:
            for attempt in runner.finished():
                if attempt.succeeded:
                    self._rate(runner, attempt)
                if not attempt.is_rated:
                    runner.drop(attempt)
                    continue
                best.append(attempt)
                best.sort(key=lambda attempt: (-attempt.score, attempt.index))
                if is_limited and len(best) > count:
                    runner.drop(best.pop())
        except Stopped:
            if runner.is_cancelled:
                raise
        brought: list[Attempt] = []
        for attempt in best:
            if len(brought) < count and runner.bring(attempt):
                brought.append(attempt)
        return brought

    def score(self, index: int, returned: float | None, path: Path) -> float:
        """Returns the score of a success with its branch at `path`, which may have returned one."""
        if self.evaluate is not None:
            return checked_score(self.evaluate(path))
        if returned is not None:
            return returned
        return 1.0 if self._scores is None else self._scores[index]

    def _rate(self, runner: Runner, attempt: Attempt) -> None:
        if self.evaluate is not None and not runner.is_remote:
            value = runner.consult(attempt, self.evaluate, attempt.path)
            try:
                runner.rate(attempt, checked_score(value))
            except ValueError as error:
                runner.fail(attempt, error)
        elif attempt.answer.score is not None:
            runner.rate(attempt, attempt.answer.score)
        else:
            runner.rate(attempt, 1.0 if self._scores is None else self._scores[attempt.index])
