"""BestOfN: let all candidates finish, take the one with the highest score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from branching.fs import Branch, Workspace
from branching.patterns.attempt import Attempt
from branching.patterns.outcome import SpeculationOutcome, checked_score, read_scored
from branching.patterns.pattern import Options, Pattern, checked_candidates
from branching.patterns.runner import Runner, Stopped

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_N = 3


class BestOfN(Pattern):
    """Runs candidates in parallel branches and commits the best success.

    Either one task, `task(path, attempt)`, tried `n` times, or a sequence of candidates,
    `candidate(path)`; `n` belongs to the first form only. Both return a bool or a pair
    (bool, score).

    A success is worth, in this order: what `evaluate(path)` says of its branch, the score it
    returned, its entry in `scores`, 1.0. Of equals the first in candidate order wins. When the
    timeout ends the call, the best of those that have finished is committed.
    """

    label = "best-of-n"

    def __init__(
        self,
        candidates_or_task: Sequence[Callable[[Path], object]] | Callable[[Path, int], object],
        n: int | None = None,
        *,
        scores: Sequence[float] | None = None,
        evaluate: Callable[[Path], float] | None = None,
        max_parallel: int | None = None,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(timeout=timeout, max_parallel=max_parallel, **options)
        self._calls = tries(candidates_or_task, n, DEFAULT_N)
        if scores is not None and len(scores) != len(self._calls):
            raise ValueError(f"{len(scores)} scores for {len(self._calls)} candidates")
        self._scores = None if scores is None else [checked_score(score) for score in scores]
        self._evaluate = evaluate

    def __call__(self, workspace: Workspace | Branch) -> SpeculationOutcome:
        with self._runner(workspace) as runner:
            attempts = [
                runner.start(function, *args, read=read_scored) for function, args in self._calls
            ]
            try:
                for attempt in runner.finished():
                    if attempt.succeeded:
                        self._rate(runner, attempt)
                    if not attempt.succeeded:
                        runner.drop(attempt)
            except Stopped:
                if runner.is_cancelled:
                    raise
            rated = [attempt for attempt in attempts if attempt.is_rated]
            if rated:
                runner.commit(max(rated, key=lambda attempt: attempt.score))
        return runner.outcome()

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


def tries(
    candidates_or_task: Sequence[Callable[[Path], object]] | Callable[[Path, int], object],
    n: int | None,
    default_n: int,
) -> list[tuple[Callable[..., object], tuple[int, ...]]]:
    """Returns what to call for each try: one task `n` times, or each candidate once."""
    if callable(candidates_or_task):
        count = default_n if n is None else n
        if count < 1:
            raise ValueError(f"n must be 1 or more, not {count!r}")
        return [(candidates_or_task, (index,)) for index in range(count)]
    if n is not None:
        raise TypeError("n is for a single task; a sequence of candidates has its own length")
    return [(candidate, ()) for candidate in checked_candidates(candidates_or_task)]
