"""The interpretation of a candidate's return value. `outcome` has the results of a pattern."""

from __future__ import annotations

import math
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Literal, NamedTuple

import branching
from branching.fs import DiffSummary

if TYPE_CHECKING:
    import branching.process

State = Literal["won", "succeeded", "failed", "timed_out", "cancelled", "error"]
"""How a candidate ended.

won         its branch was chosen, and committed unless the call leaves it open
succeeded   it succeeded, but another candidate or none was chosen
failed      it returned a false value, or an exit code other than 0
timed_out   a time limit expired before it ended
cancelled   it was stopped, or not started, because it was no longer needed
error       it raised an exception, or could not be run
"""


class CandidateResult(NamedTuple):
    """A candidate's return value, after interpretation."""

    success: bool
    value: object = None
    score: float | None = None
    """The score that the candidate returned; None if it returned none."""
    error: str = ""
    """The reason for its failure, as the candidate reported it."""
    exception: BaseException | None = None
    exit_code: int = 0
    changes: DiffSummary | None = None
    ended: branching.process.Ended | None = None
    """How the candidate's process ended; None if it had no separate process."""


def reject_coroutines(value: object) -> object:
    """Returns `value`, the return value of a user's function, unless it is a coroutine.

    Args:
        value: The return value.

    Returns:
        The same value.

    Raises:
        TypeError: It is a coroutine or a generator, so the function's body has not run.
    """
    if isinstance(value, (CoroutineType, GeneratorType)):
        value.close()  # otherwise Python warns that it was never awaited
    elif not isinstance(value, AsyncGeneratorType):
        return value
    kind = "coroutine" if isinstance(value, CoroutineType) else "generator"
    raise TypeError(
        f"candidate returned a {kind}, which was not run; candidates must be synchronous functions"
    )


def read_verdict(value: object) -> CandidateResult:
    """Interprets a return value as success or failure by its truth value."""
    if isinstance(value, CandidateResult):
        return value
    success = bool(value)
    return CandidateResult(success=success, value=value, exit_code=0 if success else 1)


def read_scored(value: object) -> CandidateResult:
    """Interprets a return value as success or failure, or as a pair (success, score)."""
    if isinstance(value, CandidateResult):
        _finite(value.score)
        return value
    if not (isinstance(value, tuple) and len(value) == 2):
        return read_verdict(value)
    success, score = bool(value[0]), checked_score(value[1])
    return CandidateResult(success=success, value=value, score=score, exit_code=0 if success else 1)


def read_explained(value: object) -> CandidateResult:
    """Interprets a return value as success or failure, or as a pair (success, error)."""
    if isinstance(value, CandidateResult):
        return value
    if not (isinstance(value, tuple) and len(value) == 2):
        return read_verdict(value)
    success, error = bool(value[0]), "" if value[1] is None else str(value[1])
    return CandidateResult(success=success, value=value, error=error, exit_code=0 if success else 1)


def checked_score(value: object) -> float:
    """Returns the score as a float.

    Args:
        value: The score.

    Returns:
        The score as a finite number.

    Raises:
        TypeError: It is not a number.
        ValueError: It is NaN or infinite. NaN cannot be ranked: it would win or lose by its
            position in the list.
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
