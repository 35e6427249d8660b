"""Speculate: runs candidates concurrently and commits the first success."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import branching
from branching.fs import Branch, Workspace
from branching.patterns.attempt import Attempt
from branching.patterns.base import (
    Options,
    SessionPattern,
    checked_candidates,
)
from branching.patterns.outcome import SpeculationOutcome
from branching.patterns.results import read_verdict

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Speculate(SessionPattern):
    """Runs all candidates in parallel branches and commits the first success.

    The other candidates are stopped and their branches aborted.

    All options of `branching.patterns.base.Options` are accepted as keyword arguments, too.

    Args:
        candidates: Functions `candidate(path)`. A true return value is a success.
        first_wins: False lets all candidates run to the end, or to the timeout. The first success
            in the order of the candidates is then committed. A later success is dropped at once.
        timeout: Time limit of a call in seconds. Default: no limit.
        session: A session whose memory the candidates start from. They can be Python code, too,
            whose last line is the value. The call then takes no workspace: the winner becomes the
            session, and its files are the session's. Of the shared options only `max_parallel` is
            supported.

    Raises:
        TypeError: A candidate is not callable, or an option has the wrong type.
        ValueError: There are no candidates, or an option has an invalid value.
    """

    label = "speculate"

    def __init__(
        self,
        candidates: Sequence[Callable[[Path], object] | str],
        *,
        first_wins: bool = True,
        timeout: float | None = None,
        session: branching.Session | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(timeout=timeout, **options)
        self._session = session
        if session is not None:
            self._check_session()
        self._candidates = checked_candidates(candidates, can_be_code=session is not None)
        self._first_wins = first_wins

    def _run(self, workspace: Workspace | Branch) -> SpeculationOutcome:
        with self._runner(workspace) as runner:
            for candidate in self._candidates:
                runner.start(candidate, wins_at_once=self._first_wins)
            best: Attempt | None = None
            for attempt in runner.finished():
                if not attempt.succeeded or (best is not None and best.index < attempt.index):
                    runner.drop(attempt)
                    continue
                if not runner.bring(attempt):
                    continue
                if best is not None:
                    runner.drop(best)
                best = attempt
                if self._first_wins:
                    break
            if best is not None:
                runner.commit(best)
        return runner.outcome()

    def _run_in_session(self, session: branching.Session) -> SpeculationOutcome:
        from branching.patterns.session_candidates import SessionCandidates

        candidates = SessionCandidates(
            session,
            [(candidate, ()) for candidate in self._candidates],
            read=read_verdict,
            timeout=self._timeout,
            max_parallel=self._max_parallel,
        )
        return candidates.run(first_wins=self._first_wins, rate=lambda *_: 1.0)
