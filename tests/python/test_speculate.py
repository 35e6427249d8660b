"""Speculate: the race."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import NAME_FROM

from branching import ConflictError, Speculate, Workspace


def writes(text: str, *, after: float = 0.0, says: object = True) -> Any:
    def candidate(path: Path) -> object:
        time.sleep(after)
        (path / "result").write_text(text)
        return says

    return candidate


@pytest.mark.contract("4.10", "4.12")
def test_the_first_success_is_committed_and_nothing_else(workspace: Workspace) -> None:
    release = threading.Event()

    def loser(path: Path) -> bool:
        (path / "litter").write_text("x")
        release.wait(60)
        return True

    started = time.monotonic()
    outcome = Speculate([loser, writes("won"), loser])(workspace)
    took = time.monotonic() - started
    release.set()
    assert took < 50
    assert outcome.committed
    assert outcome.winner is outcome.all_results[1]
    assert (workspace.path / "result").read_text() == "won"
    assert not (workspace.path / "litter").exists()
    assert [result.state for result in outcome.all_results] == ["cancelled", "won", "cancelled"]
    assert [result.branch_index for result in outcome.all_results] == [0, 1, 2]


@pytest.mark.contract("4.25", "4.27")
def test_no_success_changes_nothing(workspace: Workspace) -> None:
    """A false value and an exception are both failures; the exception is kept."""

    def raises(path: Path) -> bool:
        (path / "litter").write_text("x")
        raise KeyError("k")

    outcome = Speculate([writes("x", says=False), raises, writes("x", says=None)])(workspace)
    assert not outcome.committed
    assert outcome.winner is None
    assert [result.state for result in outcome.all_results] == ["failed", "error", "failed"]
    assert isinstance(outcome.all_results[1].exception, KeyError)
    assert [result.exit_code for result in outcome.all_results] == [1, 1, 1]
    assert sorted(path.name for path in workspace.path.iterdir()) == [NAME_FROM]


def test_even_a_system_exit_is_only_a_failure(workspace: Workspace) -> None:
    def leaves(path: Path) -> bool:
        raise SystemExit(3)

    outcome = Speculate([leaves])(workspace)
    assert isinstance(outcome.all_results[0].exception, SystemExit)
    assert not outcome.committed


@pytest.mark.contract("4.11")
def test_first_wins_false_runs_all_and_takes_the_first_in_order(workspace: Workspace) -> None:
    outcome = Speculate(
        [writes("0", says=False), writes("1", after=0.2), writes("2")], first_wins=False
    )(workspace)
    assert outcome.winner is outcome.all_results[1]
    assert [result.state for result in outcome.all_results] == ["failed", "won", "succeeded"]
    assert (workspace.path / "result").read_text() == "1"


@pytest.mark.contract("4.13")
def test_the_timeout_is_for_the_whole_call_and_not_shared_out(workspace: Workspace) -> None:
    """Three candidates do not get a third each."""
    outcome = Speculate(
        [writes("0", after=0.5, says=False), writes("1", after=0.5), writes("2", after=30)],
        timeout=2,
    )(workspace)
    assert outcome.winner is outcome.all_results[1]


@pytest.mark.contract("4.13")
def test_the_timeout_ends_the_call(workspace: Workspace) -> None:
    started = time.monotonic()
    outcome = Speculate([writes("0", after=60), writes("1", after=60)], timeout=0.3)(workspace)
    assert 0.3 <= time.monotonic() - started < 30
    assert not outcome.committed
    assert [result.state for result in outcome.all_results] == ["timed_out", "timed_out"]
    assert isinstance(outcome.all_results[0].exception, TimeoutError)
    assert "0.3 s" in str(outcome.all_results[0].exception)


def test_a_success_before_the_timeout_counts(workspace: Workspace) -> None:
    outcome = Speculate([writes("0", after=60), writes("1")], first_wins=False, timeout=1.5)(
        workspace
    )
    assert outcome.winner is outcome.all_results[1]


@pytest.mark.contract("4.14")
def test_max_parallel_is_the_most_that_run_concurrently(workspace: Workspace) -> None:
    lock = threading.Lock()
    both = threading.Barrier(2, timeout=60)  # each waits until another one runs beside it
    running: list[int] = []
    most = 0

    def candidate(path: Path) -> bool:
        nonlocal most
        with lock:
            running.append(1)
            most = max(most, len(running))
        both.wait()
        with lock:
            running.pop()
        return False

    outcome = Speculate([candidate] * 6, max_parallel=2)(workspace)
    assert most == 2
    assert [result.state for result in outcome.all_results] == ["failed"] * 6


def test_a_candidate_that_never_started_is_reported_as_such(workspace: Workspace) -> None:
    outcome = Speculate([writes("0"), writes("1")], max_parallel=1)(workspace)
    assert outcome.winner is outcome.all_results[0]
    assert outcome.all_results[1].state == "cancelled"
    assert outcome.all_results[1].branch_path is None


@pytest.mark.contract("4.31", "4.32")
def test_return_values_come_back_as_they_are(workspace: Workspace) -> None:
    """Any type, any size."""

    class Odd:
        pass

    odd, big = Odd(), ("x" * 200_000, {1, 2})
    outcome = Speculate([writes("", says=odd), writes("", says=big)], first_wins=False)(workspace)
    assert outcome.all_results[0].return_value is odd
    assert outcome.all_results[1].return_value is big


@pytest.mark.contract("0.4", "4.26")
def test_closures_and_lambdas_keep_their_mutations(workspace: Workspace) -> None:
    seen: list[Path] = []
    outcome = Speculate([lambda path: seen.append(path) or True])(workspace)  # type: ignore[func-returns-value]
    assert outcome.committed
    assert seen == [outcome.all_results[0].branch_path]


def test_a_commit_that_comes_second_raises_and_leaves_nothing(workspace: Workspace) -> None:
    """Another process committed first."""
    with workspace.branch("outsider") as outsider:

        def candidate(path: Path) -> bool:
            (path / "who").write_text("candidate")
            (outsider.path / "who").write_text("outsider")
            outsider.commit()
            return True

        with pytest.raises(ConflictError):
            Speculate([candidate])(workspace)
    assert (workspace.path / "who").read_text() == "outsider"
    assert workspace.branches() == []


def test_it_works_inside_a_branch(workspace: Workspace) -> None:
    with workspace.branch("outer") as outer:
        assert Speculate([writes("inner")])(outer).committed
        assert (outer.path / "result").read_text() == "inner"
        assert not (workspace.path / "result").exists()
        outer.abort()


def test_a_pattern_can_be_called_again_and_at_the_same_time(workspace: Workspace) -> None:
    pattern = Speculate([writes("x")])
    assert pattern(workspace).committed
    assert pattern(workspace).committed
    with workspace.branch("a") as a, workspace.branch("b") as b:
        threads = [threading.Thread(target=pattern, args=(where,)) for where in (a, b)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (a.path / "result").exists()
        assert (b.path / "result").exists()
        a.abort()
        b.abort()


@pytest.mark.contract("0.3", "3.15")
@pytest.mark.parametrize(
    ("candidates", "options", "error", "says"),
    [
        ([], {}, ValueError, "no candidates"),
        (None, {}, TypeError, "sequence"),
        (["make"], {}, TypeError, "candidate 0 is not callable"),
        ([print], {"timeout": 0}, ValueError, "timeout"),
        ([print], {"timeout": -1}, ValueError, "timeout"),
        ([print], {"timeout": float("nan")}, ValueError, "timeout"),
        ([print], {"max_parallel": 0}, ValueError, "max_parallel"),
        ([print], {"wait": True}, TypeError, "wait"),
        ([print], {"resource_limits": "4G"}, TypeError, "resource_limits"),
        ([print], {"group_limits": "4G"}, TypeError, "group_limits"),
    ],
    ids=str,
)
def test_invalid_or_unsupported_options_are_refused(
    candidates: Any, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    """No option is silently ignored."""
    with pytest.raises(error, match=says):
        Speculate(candidates, **options)


@pytest.mark.contract("4.12")
def test_the_winners_latency_is_its_own(real_workspace: Workspace) -> None:
    """The call does not wait for the losers. benchmarks/latency.py measures how fast."""
    release = threading.Event()
    ended: list[Path] = []

    def loser(path: Path) -> bool:
        release.wait(60)
        ended.append(path)
        return True

    outcome = Speculate([loser, lambda path: True, loser, loser])(real_workspace)
    assert outcome.winner is outcome.all_results[1]
    assert ended == []
    release.set()
