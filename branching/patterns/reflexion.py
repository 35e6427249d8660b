"""Reflexion: repeats a task, with feedback on the previous failure, until it succeeds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from branching.fs import Branch, Workspace
from branching.patterns.attempt import Attempt
from branching.patterns.base import Options, Pattern
from branching.patterns.outcome import SpeculationOutcome
from branching.patterns.runner import Runner, Stopped

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_MAX_RETRIES = 3

_log = logging.getLogger("branching")


class Reflexion(Pattern):
    """Calls a task repeatedly until it succeeds, and commits the success.

    Each attempt gets a new branch. A failed branch is dropped after its critique.

    All options of `branching.patterns.base.Options` are accepted as keyword arguments, too.

    Args:
        task: Function `task(path, attempt, feedback)`. A true return value is a success.
            `feedback` is None in the first attempt, then the result of `critique`.
        max_retries: Maximum number of attempts, including the first.
        critique: Returns feedback on the failed branch at `path`. If it raises, the exception is
            logged and the next attempt gets no feedback.
        timeout: Time limit of a call in seconds. Default: no limit.

    Raises:
        TypeError: The task is not callable, or an option has the wrong type.
        ValueError: An option has an invalid value.
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
        """Repeats the task and commits the first success; see `Pattern.__call__`."""
        with self._runner(workspace) as runner:
            feedback: str | None = None
            for number in range(self._max_retries):
                is_last = number == self._max_retries - 1
                attempt = runner.start(
                    self._task,
                    number,
                    feedback,
                    feedback=feedback or "",
                    wins_at_once=True,
                    is_critiqued=self._critique is not None and not is_last,
                )
                runner.finish(attempt)
                if attempt.succeeded and runner.bring(attempt):
                    runner.commit(attempt)
                    break
                feedback = None if is_last else self._ask_critique(runner, attempt)
                runner.drop(attempt)
        return runner.outcome()

    def _ask_critique(self, runner: Runner, attempt: Attempt) -> str | None:
        if self._critique is None or not runner.bring(attempt):
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
