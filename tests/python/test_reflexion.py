"""Reflexion: try, learn, try again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from conftest import NAME_FROM

from branching import Reflexion, Workspace


@pytest.mark.contract("4.18", "4.19")
def test_feedback_goes_from_the_critique_to_the_next_attempt(workspace: Workspace) -> None:
    """Each attempt has a fresh branch; the critique sees the failed one."""
    seen: list[tuple[int, str | None, list[str]]] = []

    def task(path: Path, attempt: int, feedback: str | None) -> bool:
        seen.append((attempt, feedback, sorted(entry.name for entry in path.iterdir())))
        (path / f"try-{attempt}").write_text("x")
        return attempt == 2

    def critique(path: Path) -> str:
        return "saw " + ",".join(sorted(entry.name for entry in path.glob("try-*")))

    outcome = Reflexion(task, max_retries=5, critique=critique)(workspace)
    assert seen == [
        (0, None, [NAME_FROM]),
        (1, "saw try-0", [NAME_FROM]),
        (2, "saw try-1", [NAME_FROM]),
    ]
    assert outcome.winner is outcome.all_results[2]
    assert [result.state for result in outcome.all_results] == ["failed", "failed", "won"]
    assert [entry.name for entry in workspace.path.glob("try-*")] == ["try-2"]


@pytest.mark.contract("4.18", "4.25")
def test_max_retries_is_the_number_of_attempts(workspace: Workspace) -> None:
    asked = []
    outcome = Reflexion(lambda *_: False, 3, critique=lambda path: asked.append(path) or "no")(  # type: ignore[func-returns-value]
        workspace
    )
    assert len(outcome.all_results) == 3
    assert not outcome.committed
    assert len(asked) == 2, "nobody would hear what a critique says of the last attempt"


def test_without_a_critique_there_is_no_feedback(workspace: Workspace) -> None:
    heard: list[str | None] = []
    Reflexion(lambda path, attempt, feedback: heard.append(feedback), 2)(workspace)
    assert heard == [None, None]


@pytest.mark.contract("4.19")
def test_a_critique_that_raises_gives_no_feedback_and_a_log_entry(
    workspace: Workspace, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[str | None] = []

    def critique(path: Path) -> str:
        raise LookupError("mine")

    outcome = Reflexion(
        lambda path, attempt, feedback: heard.append(feedback), 2, critique=critique
    )(workspace)
    assert heard == [None, None]
    assert not outcome.committed
    assert "critique of attempt 0 failed: mine" in caplog.text


@pytest.mark.contract("4.27")
def test_a_task_that_raises_is_a_failed_attempt(workspace: Workspace) -> None:
    def task(path: Path, attempt: int, feedback: str | None) -> bool:
        if attempt == 0:
            raise LookupError("mine")
        return True

    outcome = Reflexion(task)(workspace)
    assert isinstance(outcome.all_results[0].exception, LookupError)
    assert outcome.winner is outcome.all_results[1]


@pytest.mark.parametrize("slow", ["task", "critique"])
def test_the_timeout_is_for_the_whole_call(workspace: Workspace, slow: str) -> None:
    def task(path: Path, attempt: int, feedback: str | None) -> bool:
        time.sleep(60 if slow == "task" else 0)
        return False

    def critique(path: Path) -> str:
        time.sleep(60)
        return ""

    started = time.monotonic()
    outcome = Reflexion(task, critique=critique, timeout=0.3)(workspace)
    assert time.monotonic() - started < 30
    assert not outcome.committed
    assert len(outcome.all_results) == 1


@pytest.mark.parametrize(
    ("arguments", "error"), [(("make",), TypeError), ((print, 0), ValueError)], ids=str
)
def test_invalid_arguments_are_refused(arguments: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        Reflexion(*arguments)
