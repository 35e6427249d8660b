"""BestOfN: runs all candidates and commits the success with the highest score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import branching
from branching.fs import Branch, Workspace
from branching.patterns.base import (
    Options,
    SessionPattern,
    expand_candidates,
)
from branching.patterns.outcome import SpeculationOutcome
from branching.patterns.results import read_scored
from branching.patterns.scoring import Evaluate, Rating

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_N = 3


class BestOfN(SessionPattern):
    """Runs candidates in parallel branches and commits the success with the highest score.

    The score of a success is the first of these that exists: the result of `evaluate(path)`, the
    score that the candidate returned, its entry in `scores`, 1.0. If scores are equal, the first
    in candidate order wins.

    All options of `branching.patterns.base.Options` are accepted as keyword arguments, too.

    Args:
        candidates_or_task: Functions `candidate(path)`, or one function `task(path, attempt)` that
            is called `n` times. They return a bool or a pair (bool, score).
        n: Number of calls of the task. Default: 3. Not allowed for a sequence of candidates.
        scores: A score for each candidate.
        evaluate: Returns the score of the branch at `path`.
        timeout: Time limit of a call in seconds. The best success of the candidates that have
            finished by then is committed. Default: no limit.
        session: A session whose memory the candidates start from. They can be Python code, too,
            whose last line is the value. The call then takes no workspace: the winner becomes the
            session, and its files are the session's. Of the shared options only `max_parallel` is
            supported.

    Raises:
        TypeError: A candidate is not callable, or an option has the wrong type.
        ValueError: There are no candidates, or an option has an invalid value.
    """

    label = "best-of-n"

    def __init__(
        self,
        candidates_or_task: Sequence[Callable[[Path], object] | str]
        | Callable[[Path, int], object],
        n: int | None = None,
        *,
        scores: Sequence[float] | None = None,
        evaluate: Evaluate | None = None,
        timeout: float | None = None,
        session: branching.Session | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(timeout=timeout, **options)
        self._session = session
        if session is not None:
            self._check_session()
        self._calls = expand_candidates(
            candidates_or_task, n, DEFAULT_N, can_be_code=session is not None
        )
        if scores is not None and len(scores) != len(self._calls):
            raise ValueError(f"{len(scores)} scores for {len(self._calls)} candidates")
        self._rating = Rating(evaluate, scores)

    def _run(self, workspace: Workspace | Branch) -> SpeculationOutcome:
        with self._runner(workspace) as runner:
            for candidate, args in self._calls:
                runner.start(candidate, *args, read=read_scored, evaluate=self._rating.evaluate)
            for best in self._rating.best(runner, 1):
                runner.commit(best)
        return runner.outcome()

    def _run_in_session(self, session: branching.Session) -> SpeculationOutcome:
        from branching.patterns.session_candidates import SessionCandidates

        candidates = SessionCandidates(
            session,
            self._calls,
            read=read_scored,
            timeout=self._timeout,
            max_parallel=self._max_parallel,
        )
        return candidates.run(first_wins=False, rate=self._rating.score)
