"""Tournament: compares successes in pairs until one is left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from branching.fs import Branch, Workspace
from branching.patterns.attempt import Attempt
from branching.patterns.base import Options, Pattern, expand_candidates
from branching.patterns.outcome import SpeculationOutcome
from branching.patterns.runner import Runner

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_N = 4

Judge = Callable[[Path, Path], int]
"""`judge(path_a, path_b)` returns 0 if a is better, 1 if b is better."""


class Tournament(Pattern):
    """Runs candidates in parallel branches, then eliminates successes in pairs by a judge.

    Each round pairs the remaining successes in candidate order. The loser of a pair is dropped as
    soon as it is known, or with `parallel_judges` at the end of the round. Successes are compared
    when all candidates have finished, so all of them stay open until then. The last of an odd
    number goes to the next round without a comparison. A sole success wins without a comparison.

    All options of `branching.patterns.base.Options` are accepted as keyword arguments, too.

    Args:
        candidates_or_task: Functions `candidate(path)`, or one function `task(path, index)` that
            is called `n` times. A true return value is a success.
        n: Number of calls of the task. Default: 4. Not allowed for a sequence of candidates.
        judge: `judge(path_a, path_b)` returns 0 if a is better, 1 if b is better.
        parallel_judges: Judge all pairs of a round concurrently.
        timeout: Time limit of a call in seconds. If it expires while candidates run, nothing is
            compared: the call commits only a sole success. Default: no limit.

    Raises:
        TypeError: A candidate or the judge is not callable, or an option has the wrong type.
        ValueError: There are no candidates, or an option has an invalid value.
    """

    label = "tournament"

    def __init__(
        self,
        candidates_or_task: Sequence[Callable[[Path], object]] | Callable[[Path, int], object],
        n: int | None = None,
        *,
        judge: Judge,
        parallel_judges: bool = False,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(timeout=timeout, **options)
        self._calls = expand_candidates(candidates_or_task, n, DEFAULT_N)
        if not callable(judge):
            raise TypeError(f"judge must be callable, not {judge!r}")
        self._judge = judge
        self._parallel_judges = parallel_judges

    def __call__(self, workspace: Workspace | Branch) -> SpeculationOutcome:
        """Runs and judges the candidates and commits the winner; see `Pattern.__call__`."""
        with self._runner(workspace) as runner:
            attempts = [runner.start(candidate, *args) for candidate, args in self._calls]
            for attempt in runner.finished():
                if not attempt.succeeded:
                    runner.drop(attempt)
            left = [attempt for attempt in attempts if attempt.succeeded and runner.bring(attempt)]
            while len(left) > 1:
                left = self._round(runner, left)
            if left:
                runner.commit(left[0])
        return runner.outcome()

    def _round(self, runner: Runner, left: list[Attempt]) -> list[Attempt]:
        """Judges one round and returns the remaining attempts."""
        pairs = list(zip(left[::2], left[1::2], strict=False))
        matches = [(a, self._judge, (a.path, b.path)) for a, b in pairs]
        winners: list[Attempt] = []
        verdicts: Iterable[object]
        if self._parallel_judges:
            verdicts = runner.consult_all(matches)
        else:
            verdicts = (runner.consult(a, judge, *paths) for a, judge, paths in matches)
        for (a, b), verdict in zip(pairs, verdicts, strict=True):
            winner, loser = (b, a) if _is_second(verdict) else (a, b)
            runner.tell(winner, "judged", f"better than {loser.index}", loser=loser)
            runner.drop(loser)
            winners.append(winner)
        return [*winners, *left[2 * len(pairs) :]]


def _is_second(verdict: object) -> bool:
    if verdict not in (0, 1):
        raise ValueError(f"a judge must return 0 (the first) or 1 (the second), not {verdict!r}")
    return verdict == 1
