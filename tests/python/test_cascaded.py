"""Cascaded: waves with more and more attempts."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from branching import Cascaded, Workspace


class Task:
    """Fails with its number for an error until it has been called often enough."""

    def __init__(self, succeeds_at: int, delay: float = 0.0) -> None:
        self.lock = threading.Lock()
        self.heard: list[list[str]] = []
        self.succeeds_at = succeeds_at
        self.delay = delay

    def __call__(self, path: Path, feedback: list[str]) -> tuple[bool, str]:
        with self.lock:
            number = len(self.heard)
            self.heard.append(list(feedback))
        feedback.append("mine alone")
        (path / "number").write_text(str(number))
        if number == self.succeeds_at:
            return True, "ignored"
        time.sleep(self.delay)
        return False, f"error {number}"


@pytest.mark.contract("4.24")
def test_the_first_wave_is_enough(workspace: Workspace) -> None:
    task = Task(0)
    outcome = Cascaded(task)(workspace)
    assert task.heard == [[]]
    assert outcome.winner is outcome.all_results[0]
    assert len(outcome.all_results) == 1


@pytest.mark.contract("4.24")
def test_waves_widen_and_hear_of_all_failures_before(workspace: Workspace) -> None:
    task = Task(5, delay=0.05)
    outcome = Cascaded(task)(workspace)
    assert sorted(map(len, task.heard)) == [0, 1, 1, 3, 3, 3, 3]
    assert task.heard[1] == ["error 0"]
    assert sorted(task.heard[6]) == ["error 0", "error 1", "error 2"]
    assert outcome.committed
    assert (workspace.path / "number").read_text() == "5"
    assert [result.branch_index for result in outcome.all_results] == list(range(7))


@pytest.mark.contract("4.25")
def test_all_waves_may_fail(workspace: Workspace) -> None:
    task = Task(99)
    outcome = Cascaded(task, fan_out=(2, 1))(workspace)
    assert not outcome.committed
    assert len(task.heard) == 3
    assert not (workspace.path / "number").exists()


@pytest.mark.contract("4.24")
def test_empty_errors_are_dropped_and_exceptions_are_errors(workspace: Workspace) -> None:
    heard = []

    def task(path: Path, feedback: list[str]) -> Any:
        heard.append(feedback)
        if len(heard) == 1:
            return False, ""
        if len(heard) == 2:
            raise LookupError("mine")
        return len(heard) == 4

    outcome = Cascaded(task, fan_out=(1, 1, 1, 1))(workspace)
    assert heard == [[], [], ["mine"], ["mine"]]
    assert isinstance(outcome.all_results[1].exception, LookupError)
    assert outcome.winner is outcome.all_results[3]


def test_a_wave_has_its_own_time(workspace: Workspace) -> None:
    calls = []

    def task(path: Path, feedback: list[str]) -> tuple[bool, str]:
        calls.append(feedback)
        if len(calls) == 1:
            time.sleep(60)
        return True, ""

    started = time.monotonic()
    outcome = Cascaded(task, fan_out=(1, 1), wave_timeout=1.5)(workspace)
    assert time.monotonic() - started < 30
    assert [result.state for result in outcome.all_results] == ["timed_out", "won"]
    assert "1.5 s" in str(outcome.all_results[0].exception)


def test_the_timeout_ends_all_waves(workspace: Workspace) -> None:
    calls = []

    def task(path: Path, feedback: list[str]) -> tuple[bool, str]:
        calls.append(feedback)
        time.sleep(0 if len(calls) == 1 else 60)
        return False, ""

    started = time.monotonic()
    outcome = Cascaded(task, fan_out=(1,) * 20, timeout=1.5)(workspace)
    assert time.monotonic() - started < 30
    assert [result.state for result in outcome.all_results] == ["failed", "timed_out"]


@pytest.mark.parametrize(
    "options",
    [{"fan_out": ()}, {"fan_out": (1, 0)}, {"wave_timeout": 0}, {"timeout": -1}],
    ids=str,
)
def test_invalid_arguments_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Cascaded(print, **options)
    with pytest.raises(TypeError):
        Cascaded("make")  # type: ignore[arg-type]
