"""One candidate being tried: its branch, its state, and the task that runs it.

An Attempt belongs to the thread that called the pattern; only that thread changes it. A Task is
what a thread of its own runs for it (the candidate, or a callback such as evaluate), and what that
thread sees of the attempt.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from branching._cancellation import CancelScope
from branching.fs import Branch, DiffSummary
from branching.patterns.results import CandidateResult, SpeculationResult, State

if TYPE_CHECKING:
    from branching.process import CallLimits, Ended

P = ParamSpec("P")
R = TypeVar("R")


class Attempt:
    """One candidate, from the moment it is lined up to its result."""

    def __init__(self, index: int, branch: Branch, feedback: str, label: str = "") -> None:
        self.index = index
        self.branch = branch
        self.feedback = feedback
        """What earlier attempts taught, as text for a command."""
        self.label = label
        """What is tried, for people."""
        self.budget: CallLimits | None = None
        """What it may use, if that is limited."""
        self.state: State | None = None
        """None while it waits or runs."""
        self.answer = CandidateResult(success=False)
        self.score = 0.0
        self.is_rated = False
        """`score` is what the pattern goes by, not just what the answer implied."""
        self.changes: DiffSummary | None = None
        """What it changed, once that is known."""
        self._started: float | None = None
        self._seconds = 0.0

    @property
    def path(self) -> Path:
        """The directory it works in."""
        return self.branch.path

    @property
    def succeeded(self) -> bool:
        return self.state in ("succeeded", "won")

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return self._seconds

    def begin(self) -> None:
        self._started = time.monotonic()

    def end(self, state: State, answer: CandidateResult) -> None:
        if self._started is not None:
            self._seconds = time.monotonic() - self._started
        self.state = state
        self.answer = answer
        self.score = _score(answer)
        self.changes = answer.changes

    def result(self) -> SpeculationResult:
        return SpeculationResult(
            branch_index=self.index,
            success=self.succeeded,
            score=self.score,
            return_value=self.answer.value,
            exception=self.answer.exception,
            branch_path=None if self._started is None else self.path,
            exit_code=self.answer.exit_code,
            state=self.state or "cancelled",
            duration=self._seconds,
            branch_name=self.branch.name,
            label=self.label,
            changes=self.changes,
            kept=self.branch.is_open,
            process=self.answer.ended,
        )


class Task(CancelScope):
    """Code that runs in a thread of its own on behalf of one attempt."""

    def __init__(
        self, attempt: Attempt, say: Callable[[Attempt, str], None], *, must_end: bool
    ) -> None:
        super().__init__()
        self.attempt = attempt
        self._say = say
        self.ended: Ended | None = None
        """How the process that ran for it has ended."""
        self.must_end = must_end
        """It ends when cancelled, and the call waits for that. A plain function cannot be
        stopped: its thread is left behind, on a branch that is gone."""

    @staticmethod
    def of_caller() -> Task | None:
        """Returns the task that the calling code runs in, if it runs in one."""
        scope = CancelScope.current()
        return scope if isinstance(scope, Task) else None

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls `function` under this scope. Nobody commits the branch meanwhile."""
        with self.attempt.branch.in_use():
            return super().run(function, *args, **kwargs)

    def say(self, block: str) -> None:
        """Tells whole lines of output, without the last one's end."""
        self._say(self.attempt, block)


def _score(answer: CandidateResult) -> float:
    if answer.score is not None:
        return answer.score
    return 1.0 if answer.success else 0.0


def with_end(answer: CandidateResult, task: Task) -> CandidateResult:
    """Adds how the candidate's process ended, if it had one."""
    ended = task.ended
    if ended is None:
        return answer
    if not answer.success and ended.success and ended.oom_kills:
        # The function noticed only that a process that it had started failed.
        reason = f"out of memory: a process that it started was killed ({ended.reason})"
        ended = replace(ended, how="oom", reason=reason)
        answer = replace(answer, error=answer.error or reason)
    return replace(answer, ended=ended, exit_code=ended.exit_code or answer.exit_code)


def ends_when_cancelled(function: Callable[..., object]) -> bool:
    """Whether it is a command, or the like, that can be told to end."""
    return bool(getattr(function, "ends_when_cancelled", False))


def label_of(function: Callable[..., object]) -> str:
    """What it is called, for people."""
    label = getattr(function, "label", None) or getattr(function, "__name__", "")
    return label if isinstance(label, str) else ""
