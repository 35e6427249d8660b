"""Cascaded: runs growing waves of attempts, each with the errors of the earlier waves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from branching.fs import Branch, Workspace
from branching.patterns.attempt import Attempt
from branching.patterns.base import Options, Pattern, check_seconds
from branching.patterns.outcome import SpeculationOutcome
from branching.patterns.results import read_explained
from branching.patterns.runner import Runner

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_FAN_OUT = (1, 2, 4)


class Cascaded(Pattern):
    """Calls a task in waves of parallel branches and commits the first success.

    A new wave starts when all attempts of the previous one have failed. The first success is
    committed immediately and ends the call.

    All options of `branching.patterns.base.Options` are accepted as keyword arguments, too.

    Args:
        task: Function `task(path, feedback)` that returns (success, error). `feedback` lists the
            errors of all failed attempts of earlier waves. For an attempt that raised, it has the
            text of the exception. Empty errors are left out.
        fan_out: Number of attempts in each wave.
        timeout: Time limit of a call in seconds. Default: no limit.
        wave_timeout: Time limit of each wave in seconds. Default: no limit.

    Raises:
        TypeError: The task is not callable, or an option has the wrong type.
        ValueError: An option has an invalid value.
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
        """Runs the waves and commits the first success; see `Pattern.__call__`."""
        with self._runner(workspace) as runner:
            feedback: list[str] = []
            for width in self._fan_out:
                wave = self._wave(runner, width, feedback)
                if any(attempt.succeeded for attempt in wave) or runner.is_over:
                    break
                feedback += [error for attempt in wave if (error := _error(attempt))]
        return runner.outcome()

    def _wave(self, runner: Runner, width: int, feedback: list[str]) -> list[Attempt]:
        """Runs one wave until an attempt succeeds, which is committed, or all have failed."""
        text = "\n".join(feedback)
        wave = [
            # Each attempt gets its own list, so that it cannot change the feedback of the others.
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
            if attempt.succeeded and runner.bring(attempt):
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
