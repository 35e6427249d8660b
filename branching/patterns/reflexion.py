"""Reflexion: try, learn from the failure, try again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from branching.fs import Branch, Workspace
from branching.patterns.attempt import Attempt
from branching.patterns.base import Options, Pattern
from branching.patterns.results import SpeculationOutcome
from branching.patterns.runner import Runner, Stopped

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_MAX_RETRIES = 3

_log = logging.getLogger("branching")


class Reflexion(Pattern):
    """Calls `task(path, attempt, feedback) -> bool` again and again until it succeeds.

    Every attempt gets a fresh branch; `max_retries` is the number of attempts. `feedback` is None
    at first, then what `critique(path)` said of the branch that failed, which is dropped after.
    A critique that raises gives no feedback (and a log entry); the next attempt is made all the
    same. The first success is committed.
    """

    label = "reflexion"

    def __init__(
        self,
        task: Callable[[Path, int, str | None], object],
        max_retries: int = DEFAULT_MAX_RETRIES,
        *,
        critique: Callable[[Path], str | None] | None = None,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(timeout=timeout, **options)
        if not callable(task):
            raise TypeError(f"task must be callable, not {task!r}")
        if max_retries < 1:
            raise ValueError(f"max_retries must be 1 or more, not {max_retries!r}")
        self._task = task
        self._max_retries = max_retries
        self._critique = critique

    def __call__(self, workspace: Workspace | Branch) -> SpeculationOutcome:
        with self._runner(workspace) as runner:
            feedback: str | None = None
            for number in range(self._max_retries):
                attempt = runner.start(
                    self._task, number, feedback, feedback=feedback or "", wins_at_once=True
                )
                runner.finish(attempt)
                if attempt.succeeded:
                    runner.commit(attempt)
                    break
                is_last = number == self._max_retries - 1
                feedback = None if is_last else self._ask_critique(runner, attempt)
                runner.drop(attempt)
        return runner.outcome()

    def _ask_critique(self, runner: Runner, attempt: Attempt) -> str | None:
        if self._critique is None:
            return None
        try:
            said = runner.consult(attempt, self._critique, attempt.path)
        except Stopped:
            raise
        except Exception as error:
            _log.warning("critique of attempt %d failed: %s", attempt.index, error, exc_info=error)
            runner.tell(attempt, "critiqued", f"critique failed: {error}")
            return None
        feedback = None if said is None else str(said)
        runner.tell(attempt, "critiqued", feedback or "")
        return feedback
