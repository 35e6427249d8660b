"""Speculate: runs candidates concurrently and commits the first success."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from branching.fs import Branch, Workspace
from branching.patterns.base import Options, Pattern, checked_candidates
from branching.patterns.results import SpeculationOutcome

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Speculate(Pattern):
    """Runs all candidates in parallel branches and commits the first success.

    The other candidates are stopped and their branches aborted.

    All options of `branching.patterns.base.Options` are accepted as keyword arguments, too.

    Args:
        candidates: Functions `candidate(path)`. A true return value is a success.
        first_wins: False lets all candidates run to the end, or to the timeout. The first success
            in the order of the candidates is then committed.
        timeout: Time limit of a call in seconds. Default: no limit.

    Raises:
        TypeError: A candidate is not callable, or an option has the wrong type.
        ValueError: There are no candidates, or an option has an invalid value.
    """

    label = "speculate"

    def __init__(
        self,
        candidates: Sequence[Callable[[Path], object]],
        *,
        first_wins: bool = True,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(timeout=timeout, **options)
        self._candidates = checked_candidates(candidates)
        self._first_wins = first_wins

    def __call__(self, workspace: Workspace | Branch) -> SpeculationOutcome:
        """Runs the candidates and commits the first success; see `Pattern.__call__`."""
        with self._runner(workspace) as runner:
            attempts = [
                runner.start(candidate, wins_at_once=self._first_wins)
                for candidate in self._candidates
            ]
            for attempt in runner.finished():
                if not attempt.succeeded:
                    runner.drop(attempt)
                elif self._first_wins:
                    runner.commit(attempt)
                    break
            else:
                for attempt in attempts:
                    if attempt.succeeded:
                        runner.commit(attempt)
                        break
        return runner.outcome()
