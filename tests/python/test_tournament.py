"""Tournament: pairwise elimination."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from branching import Tournament, Workspace


def plays(strength: int, success: bool = True) -> Any:
    def candidate(path: Path) -> bool:
        (path / "strength").write_text(str(strength))
        return success

    return candidate


def strength(path: Path) -> int:
    return int((path / "strength").read_text())


def stronger(a: Path, b: Path) -> int:
    return 0 if strength(a) >= strength(b) else 1


@pytest.mark.contract("4.22")
@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("parallel", [False, True], ids=["one by one", "parallel"])
def test_the_strongest_is_left(workspace: Workspace, count: int, parallel: bool) -> None:
    """An odd one gets a bye; there are count - 1 matches."""
    matches = []

    def judge(a: Path, b: Path) -> int:
        matches.append((strength(a), strength(b)))
        return stronger(a, b)

    strengths = [(index * 5 + 3) % 7 for index in range(count)]
    outcome = Tournament([plays(s) for s in strengths], judge=judge, parallel_judges=parallel)(
        workspace
    )
    assert outcome.winner is outcome.all_results[strengths.index(max(strengths))]
    assert strength(workspace.path) == max(strengths)
    assert len(matches) == count - 1


@pytest.mark.contract("0.2")
def test_one_task_plays_n_times(workspace: Workspace) -> None:
    def task(path: Path, index: int) -> bool:
        (path / "strength").write_text(str(index))
        return True

    assert len(Tournament(task, judge=stronger)(workspace).all_results) == 4
    outcome = Tournament(task, n=2, judge=stronger)(workspace)
    assert outcome.winner is outcome.all_results[1]


@pytest.mark.contract("4.22")
def test_failures_do_not_play(workspace: Workspace) -> None:
    candidates = [plays(1), plays(9, success=False), plays(2)]
    outcome = Tournament(candidates, judge=stronger)(workspace)
    assert strength(workspace.path) == 2
    assert [result.state for result in outcome.all_results] == ["succeeded", "failed", "won"]


@pytest.mark.contract("4.22", "4.25")
def test_a_sole_survivor_wins_unjudged(workspace: Workspace) -> None:
    def judge(a: Path, b: Path) -> int:
        raise AssertionError("nobody to judge")

    outcome = Tournament([plays(1, success=False), plays(2)], judge=judge)(workspace)
    assert outcome.winner is outcome.all_results[1]
    assert not Tournament([plays(1, success=False)], judge=judge)(workspace).committed


@pytest.mark.contract("4.23")
def test_a_judge_that_raises_ends_the_call_cleanly(workspace: Workspace) -> None:
    """The published package hangs forever."""

    def judge(a: Path, b: Path) -> int:
        raise LookupError("mine")

    for parallel in (False, True):
        with pytest.raises(LookupError, match="mine"):
            Tournament([plays(1)] * 4, judge=judge, parallel_judges=parallel)(workspace)
    assert not (workspace.path / "strength").exists()


@pytest.mark.parametrize("verdict", [2, -1, None, "a"], ids=str)
def test_a_verdict_must_be_0_or_1(workspace: Workspace, verdict: Any) -> None:
    with pytest.raises(ValueError, match="must return 0"):
        Tournament([plays(1)] * 2, judge=lambda a, b: verdict)(workspace)


def test_parallel_judges_run_concurrently(workspace: Workspace) -> None:
    meeting = threading.Barrier(2, timeout=60)

    def judge(a: Path, b: Path) -> int:
        if {strength(a), strength(b)} != {1, 2}:
            meeting.wait()
        return stronger(a, b)

    candidates = [plays(1), plays(0), plays(2), plays(0)]
    assert Tournament(candidates, judge=judge, parallel_judges=True)(workspace).committed


@pytest.mark.contract("4.17")
def test_a_judge_that_hangs_does_not_outlast_the_timeout(workspace: Workspace) -> None:
    def judge(a: Path, b: Path) -> int:
        time.sleep(60)
        return 0

    started = time.monotonic()
    outcome = Tournament([plays(1)] * 2, judge=judge, timeout=0.3)(workspace)
    assert time.monotonic() - started < 30
    assert not outcome.committed


@pytest.mark.parametrize(
    ("first", "options", "error"),
    [
        ([], {}, ValueError),
        ([print], {"n": 2}, TypeError),
        (print, {"n": 0}, ValueError),
        ([print], {"judge": None}, TypeError),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(
    first: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        Tournament(first, **{"judge": stronger, **options})
