"""BestOfN: the best of several."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest

from branching import BestOfN, Workspace


def scored(score: object, *, success: object = True, after: float = 0.0) -> Any:
    def candidate(path: Path) -> tuple[object, object]:
        time.sleep(after)
        (path / "score").write_text(str(score))
        return success, score

    return candidate


def says(value: object) -> Any:
    return lambda path: value


@pytest.mark.contract("0.1", "4.15")
def test_one_task_is_tried_n_times(workspace: Workspace) -> None:
    def task(path: Path, attempt: int) -> tuple[bool, float]:
        (path / "attempt").write_text(str(attempt))
        return attempt != 2, attempt

    outcome = BestOfN(task, n=4)(workspace)
    assert outcome.winner is outcome.all_results[3]
    assert [result.score for result in outcome.all_results] == [0.0, 1.0, 2.0, 3.0]
    assert (workspace.path / "attempt").read_text() == "3"
    assert len(BestOfN(task)(workspace).all_results) == 3


@pytest.mark.parametrize("score", [1, -1, 0], ids=["the last is best", "the first is", "all equal"])
def test_no_more_branches_are_open_than_run_and_lead(workspace: Workspace, score: int) -> None:
    opened: list[int] = []

    def task(path: Path, attempt: int) -> tuple[bool, float]:
        (path / "attempt").write_text(str(attempt))
        opened.append(len(workspace.branches()))
        return True, attempt * score

    outcome = BestOfN(task, n=20, max_parallel=2)(workspace)
    assert outcome.winner is not None
    assert outcome.winner.branch_index == (19 if score == 1 else 0)
    assert len(opened) == 20
    assert max(opened) <= 3
    assert workspace.branches() == []


@pytest.mark.contract("0.1", "4.15")
def test_a_list_of_candidates_is_tried_once_each(workspace: Workspace) -> None:
    outcome = BestOfN([scored(0.5), scored(0.9), scored(0.99, success=False)])(workspace)
    assert outcome.winner is outcome.all_results[1]
    assert outcome.winner is not None
    assert outcome.winner.score == 0.9
    assert outcome.winner.return_value == (True, 0.9)
    assert (workspace.path / "score").read_text() == "0.9"
    assert [result.state for result in outcome.all_results] == ["succeeded", "won", "failed"]


@pytest.mark.contract("4.16")
@pytest.mark.parametrize(
    ("candidates", "options", "scores"),
    [
        ([says(True), says(False)], {}, [1.0, 0.0]),
        ([says(True), says(True)], {"scores": [3, 4]}, [3.0, 4.0]),
        ([scored(0.5), says(True)], {"scores": [3, 0.4]}, [0.5, 0.4]),
        ([scored(0.5), says(True)], {"evaluate": lambda path: 7}, [7.0, 7.0]),
        ([scored(0.5), says(True)], {"scores": [1, 2], "evaluate": lambda path: 7}, [7.0, 7.0]),
        ([scored(-2), scored(-1)], {}, [-2.0, -1.0]),
    ],
    ids=["bare", "scores", "own over scores", "evaluate", "evaluate over all", "negative"],
)
def test_a_score_is_evaluates_or_its_own_or_the_lists_or_one(
    workspace: Workspace, candidates: Any, options: dict[str, Any], scores: list[float]
) -> None:
    outcome = BestOfN(candidates, **options)(workspace)
    assert [result.score for result in outcome.all_results] == scores
    best = max(range(len(scores)), key=lambda index: scores[index])
    assert outcome.winner is outcome.all_results[best]


def test_evaluate_sees_the_branch_and_only_successes(workspace: Workspace) -> None:
    seen = []

    def evaluate(path: Path) -> float:
        seen.append((path / "score").read_text())
        return -float(seen[-1])

    outcome = BestOfN([scored(1), scored(2), scored(3, success=False)], evaluate=evaluate)(
        workspace
    )
    assert sorted(seen) == ["1", "2"]
    assert outcome.winner is outcome.all_results[0]


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf, "much", None], ids=str)
def test_a_score_that_cannot_be_ranked_is_a_failure(workspace: Workspace, score: object) -> None:
    outcome = BestOfN([scored(score), scored(0.1)])(workspace)
    assert outcome.winner is outcome.all_results[1]
    assert outcome.all_results[0].state == "error"
    assert not outcome.all_results[0].success
    assert "score must be" in str(outcome.all_results[0].exception)


def test_an_evaluation_that_cannot_be_ranked_is_a_failure(workspace: Workspace) -> None:
    def evaluate(path: Path) -> float:
        return math.nan if (path / "score").read_text() == "1" else 0.1

    outcome = BestOfN([scored(1), scored(2)], evaluate=evaluate)(workspace)
    assert outcome.winner is outcome.all_results[1]
    assert outcome.all_results[0].state == "error"


def test_the_first_of_equals_wins(workspace: Workspace) -> None:
    outcome = BestOfN([scored(1, after=0.2), scored(1)])(workspace)
    assert outcome.winner is outcome.all_results[0]


@pytest.mark.contract("4.23")
def test_an_evaluate_that_raises_ends_the_call_cleanly(workspace: Workspace) -> None:
    """The call ends with evaluate's exception; no branch is left (checked by the fixture), nothing
    is committed."""

    def evaluate(path: Path) -> float:
        raise ArithmeticError("mine")

    with pytest.raises(ArithmeticError, match="mine"):
        BestOfN([scored(1), scored(2, after=0.1)], evaluate=evaluate)(workspace)
    assert not (workspace.path / "score").exists()


def test_an_evaluate_that_returns_no_number_is_a_type_error(workspace: Workspace) -> None:
    with pytest.raises(TypeError, match="score must be a number"):
        BestOfN([scored(1)], evaluate=lambda path: "good")(workspace)  # type: ignore[arg-type,return-value]


@pytest.mark.contract("4.17")
def test_the_timeout_stops_the_wait_and_the_best_so_far_is_committed(
    workspace: Workspace,
) -> None:
    started = time.monotonic()
    outcome = BestOfN([scored(9, after=60), scored(1), scored(2)], timeout=1.5)(workspace)
    assert time.monotonic() - started < 30
    assert outcome.winner is outcome.all_results[2]
    assert [result.state for result in outcome.all_results] == ["timed_out", "succeeded", "won"]


@pytest.mark.contract("4.23")
def test_a_slow_evaluate_does_not_outlast_the_timeout(workspace: Workspace) -> None:
    started = time.monotonic()
    outcome = BestOfN([scored(1)], evaluate=lambda path: time.sleep(60) or 1.0, timeout=0.3)(  # type: ignore[func-returns-value]
        workspace
    )
    assert time.monotonic() - started < 30
    assert not outcome.committed


@pytest.mark.contract("4.25")
def test_no_success_commits_nothing(workspace: Workspace) -> None:
    outcome = BestOfN([scored(1, success=False)])(workspace)
    assert not outcome.committed
    assert not (workspace.path / "score").exists()


@pytest.mark.contract("0.1")
@pytest.mark.parametrize(
    ("first", "options", "error"),
    [
        ([], {}, ValueError),
        (says(True), {"n": 0}, ValueError),
        ([says(True)], {"n": 1}, TypeError),
        ([says(True)], {"scores": [1, 2]}, ValueError),
        ([says(True)], {"scores": [math.nan]}, ValueError),
        ("make", {}, TypeError),
    ],
    ids=["no candidates", "no attempts", "n of a list", "too many scores", "nan", "a string"],
)
def test_invalid_arguments_are_refused(
    first: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        BestOfN(first, **options)
