"""What comes out of a pattern, and how a candidate's return value is read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Literal

import branching
from branching.fs import Branch, Change, DiffSummary

if TYPE_CHECKING:
    import branching.process

State = Literal["won", "succeeded", "failed", "timed_out", "cancelled", "error"]
"""How a candidate ended.

won         its branch was chosen and committed
succeeded   it succeeded; another one was chosen, or none could be
failed      it said no: a false value, an exit code other than 0
timed_out   the call's time was over before it ended
cancelled   it was stopped, or never started, because it was not needed any more
error       it raised, or could not be run at all
"""


@dataclass(frozen=True, kw_only=True)
class SpeculationResult:
    """What became of one candidate."""

    branch_index: int
    """Its place in the list of candidates, or the number of the attempt."""
    success: bool
    score: float = 0.0
    return_value: object = None
    """Exactly what the candidate returned."""
    exception: BaseException | None = None
    """What it raised; TimeoutError when the call's time was over before it ended."""
    branch_path: Path | None = None
    """The directory it worked in, gone by now unless kept; None if it never started."""
    exit_code: int = 0
    """A command's exit code; 0 or 1 for a function."""
    state: State = "failed"
    duration: float = 0.0
    """Seconds it ran."""
    branch_name: str = ""
    """Name of its branch."""
    label: str = ""
    """What was tried, for people: a command as it was given, or a function's name."""
    changes: DiffSummary | None = None
    """What it changed against the branch it started from; None where that was not asked: it was
    stopped, or succeeded after another one had won."""
    kept: bool = False
    """Its branch is still open."""
    process: branching.process.Ended | None = None
    """How its process ended and what it used, if it had one of its own."""


@dataclass(frozen=True, kw_only=True)
class SpeculationOutcome:
    """What became of the whole call."""

    committed: bool = False
    winner: SpeculationResult | None = None
    all_results: list[SpeculationResult] = field(default_factory=list)
    """One result a candidate, in candidate order, whatever order they finished in."""
    branch: Branch | None = None
    """With `commit=False`: the winner's branch, still open, for the caller to end. So it is where
    `only` left something of it."""
    changes: list[Change] = field(default_factory=list)
    """What was committed, by path."""
    remaining: int = 0
    """How many paths that the winner changed were not committed: `branch` is open with them."""
    timed_out: bool = False
    """The time was over before the call could commit anything."""


@dataclass(frozen=True, kw_only=True)
class CandidateResult:
    """A candidate's return value, understood."""

    success: bool
    value: object = None
    score: float | None = None
    """What the candidate itself said it is worth; None if it did not."""
    error: str = ""
    """Why it failed, in its own words."""
    exception: BaseException | None = None
    exit_code: int = 0
    changes: DiffSummary | None = None
    ended: branching.process.Ended | None = None
    """How the process of the candidate ended, if it had one."""


def reject_coroutines(value: object) -> object:
    """Returns what a function of the user's returned. TypeError where nothing of it has run."""
    if isinstance(value, (CoroutineType, GeneratorType)):
        value.close()  # or Python warns that nobody awaited it
    elif not isinstance(value, AsyncGeneratorType):
        return value
    kind = "coroutine" if isinstance(value, CoroutineType) else "generator"
    raise TypeError(f"patterns call ordinary functions: nothing has run of one that gives a {kind}")


def read_verdict(value: object) -> CandidateResult:
    """Reads a return value that means yes or no."""
    if isinstance(value, CandidateResult):
        return value
    success = bool(value)
    return CandidateResult(success=success, value=value, exit_code=0 if success else 1)


def read_scored(value: object) -> CandidateResult:
    """Reads yes or no, or a pair of that and a score."""
    if isinstance(value, CandidateResult):
        _finite(value.score)
        return value
    if not (isinstance(value, tuple) and len(value) == 2):
        return read_verdict(value)
    success, score = bool(value[0]), checked_score(value[1])
    return CandidateResult(success=success, value=value, score=score, exit_code=0 if success else 1)


def read_explained(value: object) -> CandidateResult:
    """Reads yes or no, or a pair of that and the reason why not."""
    if isinstance(value, CandidateResult):
        return value
    if not (isinstance(value, tuple) and len(value) == 2):
        return read_verdict(value)
    success, error = bool(value[0]), "" if value[1] is None else str(value[1])
    return CandidateResult(success=success, value=value, error=error, exit_code=0 if success else 1)


def checked_score(value: object) -> float:
    """Returns the score as a float. TypeError for what is no number, ValueError for NaN and inf.

    Those two cannot be ranked: a NaN would win or lose by its place in the list.
    """
    try:
        score = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"a score must be a number, not {value!r}") from None
    _finite(score)
    return score


def _finite(score: float | None) -> None:
    if score is not None and not math.isfinite(score):
        raise ValueError(f"a score must be a finite number, not {score}")
