"""An attempt: one run of a candidate, with its branch, its state, and the task that runs it.

Only the thread that called the pattern changes an Attempt. A Task is the work that another thread
does for it (the candidate, or a callback such as evaluate).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from branching._cancellation import CancelScope
from branching.errors import BranchingError, SetupError
from branching.fs import Branch, DiffSummary
from branching.patterns.results import CandidateResult, State
from branching.runlog.events import Event, EventKind

if TYPE_CHECKING:
    from branching.patterns.outcome import SpeculationResult
    from branching.process import CallLimits, Ended

P = ParamSpec("P")
R = TypeVar("R")


class Attempt:
    """One run of a candidate, from its registration to its result."""

    def __init__(self, index: int, branch: Branch, feedback: str, label: str = "") -> None:
        self.index = index
        self.branch = branch
        self.feedback = feedback
        """Feedback on earlier attempts, as text for a command."""
        self.label = label
        """Display name of the candidate."""
        self.predecessor: int | None = None
        """Index of the attempt whose result it starts from, in a search by levels."""
        self.budget: CallLimits | None = None
        """Its resource limits; None for no limits."""
        self.state: State | None = None
        """Final state; None while it waits or runs."""
        self.answer = CandidateResult(success=False)
        self.score = 0.0
        self.is_rated = False
        """Whether the pattern has set `score`; otherwise it is the default from the answer."""
        self.changes: DiffSummary | None = None
        """Changes of its branch; None if not determined yet."""
        self.evaluate: Callable[[Path], float] | None = None
        """Returns the score of a success; a cluster calls it where the attempt ran."""
        self.is_critiqued = False
        """Whether its branch is read after a failure, too."""
        self.is_elsewhere = False
        """Whether it runs on another machine, and its branch does not exist here."""
        self.node = ""
        """Name of the node of the cluster that ran it."""
        self._started: float | None = None
        self._seconds = 0.0

    @property
    def path(self) -> Path:
        """Directory of its branch."""
        return self.branch.path

    @property
    def succeeded(self) -> bool:
        return self.state in ("succeeded", "won")

    @property
    def seconds(self) -> float:
        """Running time in seconds; 0 until it ends."""
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

    @property
    def reason(self) -> str:
        """Why it failed, as text; empty if it succeeded or gave no reason."""
        error = self.answer.exception
        return self.answer.error or (f"{type(error).__name__}: {error}" if error else "")

    def event(
        self,
        kind: EventKind,
        text: str = "",
        *,
        score: float | None = None,
        loser: int | None = None,
    ) -> Event:
        """Returns an event about the attempt in its present state."""
        process = self.answer.ended
        return Event(
            kind=kind,
            index=self.index,
            branch=self.branch.name,
            label=self.label,
            text=text,
            state=self.state or "",
            score=score,
            seconds=self._seconds,
            changes=self.changes,
            cpu_seconds=None if process is None else process.cpu_seconds,
            memory_peak_bytes=None if process is None else process.memory_peak,
            predecessor=self.predecessor,
            loser=loser,
            node=self.node,
        )

    def result(self) -> SpeculationResult:
        from branching.patterns.outcome import SpeculationResult

        return SpeculationResult(
            branch_index=self.index,
            success=self.succeeded,
            score=self.score,
            return_value=self.answer.value,
            exception=self.answer.exception,
            branch_path=None if self._started is None or self.is_elsewhere else self.path,
            exit_code=self.answer.exit_code,
            state=self.state or "cancelled",
            duration=self._seconds,
            branch_name=self.branch.name,
            label=self.label,
            changes=self.changes,
            kept=self.branch.is_open,
            process=self.answer.ended,
            node=self.node,
        )


class Task(CancelScope):
    """Code that runs in a separate thread on behalf of one attempt."""

    def __init__(
        self,
        attempt: Attempt,
        say: Callable[[Attempt, str], None] = lambda _attempt, _block: None,
        *,
        must_end: bool,
    ) -> None:
        super().__init__()
        self.attempt = attempt
        self._say = say
        self.deadline = math.inf
        """When its process is killed, on the clock of time.monotonic."""
        self.ended: Ended | None = None
        """How the process of the task ended; None if it has not ended or there is none."""
        self.must_end = must_end
        """Whether the call waits for the end of the task after cancelling it. A plain function
        cannot be stopped: its thread continues in a branch that no longer exists."""

    @staticmethod
    def of_caller() -> Task | None:
        """Returns the task that the calling code runs in, or None."""
        scope = CancelScope.current()
        return scope if isinstance(scope, Task) else None

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls `function` in this scope. No process can commit the branch in the meantime."""
        with nullcontext() if self.attempt.is_elsewhere else self.attempt.branch.in_use():
            return super().run(function, *args, **kwargs)

    def say(self, block: str) -> None:
        """Reports whole lines of output, given without the last newline."""
        self._say(self.attempt, block)


def _score(answer: CandidateResult) -> float:
    if answer.score is not None:
        return answer.score
    return 1.0 if answer.success else 0.0


def with_end(answer: CandidateResult, task: Task) -> CandidateResult:
    """Adds the end of the candidate's process to the answer, if it had one."""
    ended = task.ended
    if ended is None:
        return answer
    if not answer.success and ended.success and ended.oom_kills:
        # The function cannot see why the process that it started failed.
        reason = f"out of memory: a process that it started was killed ({ended.reason})"
        ended = replace(ended, how="oom", reason=reason)
        answer = answer._replace(error=answer.error or reason)
    return answer._replace(ended=ended, exit_code=ended.exit_code or answer.exit_code)


def changes_of(branch: Branch) -> DiffSummary | None:
    """Returns the changes of a branch, or None if they cannot be determined.

    Another candidate may have won. A more serious failure shows up at the commit.
    """
    try:
        return DiffSummary.of(branch.diff())
    except BranchingError:
        return None


def out_of_time(seconds: float) -> CandidateResult:
    """Returns the result of an attempt that did not end within the time limit of the call."""
    error = TimeoutError(f"not finished within the time limit of {seconds:g} s")
    return CandidateResult(success=False, exception=error, exit_code=1)


def setup_failed(reason: object) -> SetupError:
    """Returns the error of a call whose setup failed, for this reason or with this value."""
    return SetupError(f"the setup failed ({reason!r}); nothing was tried or committed")


def ends_when_cancelled(function: Callable[..., object]) -> bool:
    """Returns whether the function can be stopped, such as one that runs a command."""
    return bool(getattr(function, "ends_when_cancelled", False))


def label_of(function: Callable[..., object]) -> str:
    """Returns the display name of a candidate, or "" if it has none."""
    label = getattr(function, "label", None) or getattr(function, "__name__", "")
    return label if isinstance(label, str) else ""
