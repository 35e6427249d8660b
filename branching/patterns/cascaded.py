"""Cascaded: start with one, widen as long as all fail, and let each wave know why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from branching.fs import Branch, Workspace
from branching.patterns.attempt import Attempt
from branching.patterns.base import Options, Pattern, check_seconds
from branching.patterns.results import SpeculationOutcome, read_explained
from branching.patterns.runner import Runner

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_FAN_OUT = (1, 2, 4)


class Cascaded(Pattern):
    """Calls `task(path, feedback) -> (success, error)` in waves of parallel branches.

    `fan_out` has the width of each wave. `feedback` lists the errors of all failed attempts of
    the waves before, [] in the first; an attempt that raised adds its exception's text, an empty
    error adds nothing. The first success of a wave is committed at once and ends the call.
    `wave_timeout` limits each wave, `timeout` the whole call.
    """

    label = "cascaded"

    def __init__(
        self,
        task: Callable[[Path, list[str]], object],
        *,
        fan_out: Sequence[int] = DEFAULT_FAN_OUT,
        timeout: float | None = None,
        wave_timeout: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(timeout=timeout, **options)
        if not callable(task):
            raise TypeError(f"task must be callable, not {task!r}")
        if not fan_out or any(width < 1 for width in fan_out):
            raise ValueError(f"fan_out must be one or more numbers of 1 or more, not {fan_out!r}")
        check_seconds("wave_timeout", wave_timeout)
        self._task = task
        self._fan_out = tuple(fan_out)
        self._wave_timeout = wave_timeout

    def __call__(self, workspace: Workspace | Branch) -> SpeculationOutcome:
        with self._runner(workspace) as runner:
            feedback: list[str] = []
            for width in self._fan_out:
                wave = self._wave(runner, width, feedback)
                if any(attempt.succeeded for attempt in wave) or runner.is_over:
                    break
                feedback += [error for attempt in wave if (error := _error(attempt))]
        return runner.outcome()

    def _wave(self, runner: Runner, width: int, feedback: list[str]) -> list[Attempt]:
        """Runs one wave to its first success, which is committed, or until all have failed."""
        text = "\n".join(feedback)
        wave = [
            # Each gets a list of its own: what one does to it is not the others' feedback.
            runner.start(
                self._task,
                list(feedback),
                read=read_explained,
                feedback=text,
                wins_at_once=True,
            )
            for _ in range(width)
        ]
        for attempt in runner.finished(within=self._wave_timeout):
            if attempt.succeeded:
                runner.commit(attempt)
                return wave
            runner.drop(attempt)
        runner.stop(timed_out_after=self._wave_timeout)
        for attempt in wave:
            runner.drop(attempt)
        return wave


def _error(attempt: Attempt) -> str:
    if attempt.answer.exception is not None and attempt.state != "timed_out":
        return str(attempt.answer.exception)
    return attempt.answer.error
