"""Ctrl-C in a program that uses the library, at moments where work could be lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from branching import Speculate, Workspace
from branching._signals import defer_sigint
from branching.fs import automount


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def interrupted_after(function: Callable[..., Any], times: int = 1) -> Callable[..., Any]:
    def call(*args: object, **options: object) -> object:
        value = function(*args, **options)
        for _ in range(times):
            interrupt()
        return value

    return call


def test_it_is_raised_at_the_end() -> None:
    reached: list[bool] = []
    with pytest.raises(KeyboardInterrupt), defer_sigint(reached.append):
        interrupt()
        assert reached == [False]
        interrupt()
        assert reached == [False, True]
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_the_third_interrupt_is_not_deferred() -> None:
    reached = 0
    with pytest.raises(KeyboardInterrupt), defer_sigint():
        for _ in range(4):
            interrupt()
            reached += 1
    assert reached == 2


def test_a_handler_of_the_programs_own_is_left() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        with defer_sigint():
            interrupt()
            assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_thread_hears_nothing_of_it() -> None:
    ended: list[bool] = []

    def work() -> None:
        with defer_sigint():
            ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended == [True]


@pytest.mark.parametrize("times", [1, 2])
def test_a_branch_that_was_just_made_is_dropped(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    backend = type(workspace._backend)
    monkeypatch.setattr(backend, "create", interrupted_after(backend.create, times))
    with pytest.raises(KeyboardInterrupt):
        Speculate([lambda path: True])(workspace)
    assert workspace.branches() == []
    with pytest.raises(KeyboardInterrupt), workspace.branch("b"):
        raise AssertionError("it is not entered")
    assert workspace.branches() == []


def test_a_branch_is_ended_all_the_same(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = type(workspace._backend)
    commit: Callable[..., Any] = backend.commit

    def interrupted(*args: Any, **options: Any) -> Any:
        interrupt()
        return commit(*args, **options)

    monkeypatch.setattr(backend, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt), workspace.branch("b") as branch:
        (branch.path / "made").write_text("x")
    assert workspace.branches() == []
    assert (workspace.path / "made").exists()


def test_a_mount_that_was_just_made_goes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixture of all tests looks for what is left."""
    monkeypatch.setattr(automount, "_run", interrupted_after(automount._run, 2))
    base = place / "base"
    base.mkdir()
    with pytest.raises(KeyboardInterrupt):
        Workspace.open(base)
    assert list(base.iterdir()) == []
