"""Speculate: race candidates, take the first that succeeds."""

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
    """Runs `candidate(path) -> bool` for all candidates in parallel branches.

    The first success is committed at once, the others are stopped and aborted. With
    `first_wins=False` all run to the end (or the timeout), and the first success in the order of
    the candidates is committed.
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
