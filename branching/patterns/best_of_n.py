"""BestOfN: let all candidates finish, take the one with the highest score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from branching.fs import Branch, Workspace
from branching.patterns.base import Options, Pattern, expand_candidates
from branching.patterns.results import SpeculationOutcome, read_scored
from branching.patterns.scoring import Evaluate, Rating

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
        evaluate: Evaluate | None = None,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(timeout=timeout, **options)
        self._calls = expand_candidates(candidates_or_task, n, DEFAULT_N)
        if scores is not None and len(scores) != len(self._calls):
            raise ValueError(f"{len(scores)} scores for {len(self._calls)} candidates")
        self._rating = Rating(evaluate, scores)

    def __call__(self, workspace: Workspace | Branch) -> SpeculationOutcome:
        with self._runner(workspace) as runner:
            for candidate, args in self._calls:
                runner.start(candidate, *args, read=read_scored)
            best = self._rating.best(runner, 1)
            if best:
                runner.commit(best[0])
        return runner.outcome()
