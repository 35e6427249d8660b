"""How signals reach a call of the command, and what they do around it."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from branching._cancellation import STOP_GRACE_SECONDS, CancelScope
from branching.cli.error_handling import Interrupted
from branching.cli.signals import defer_signals, run_interruptible

SECONDS_MAX = 60


def test_the_first_signal_leaves_a_moment_and_the_second_none() -> None:
    graces: list[float] = []
    heard = threading.Semaphore(0)

    def on_cancel(grace: float) -> None:
        graces.append(grace)
        heard.release()

    def call() -> None:
        scope = CancelScope.current()
        assert scope
        scope.on_cancel(on_cancel)
        for number in (signal.SIGINT, signal.SIGINT):
            os.kill(os.getpid(), number)
            assert heard.acquire(timeout=SECONDS_MAX)

    with pytest.raises(Interrupted) as caught:
        run_interruptible(call, is_done=lambda _: False)
    assert graces == [STOP_GRACE_SECONDS, 0.0]
    assert caught.value.signum == signal.SIGINT


def test_a_commit_made_before_the_signal_is_the_value() -> None:
    def call() -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return "committed"

    assert run_interruptible(call, is_done=lambda _: True) == "committed"


def test_a_signal_while_a_workspace_is_opened_ends_the_call_before_it_begins() -> None:
    calls: list[str] = []
    with defer_signals():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted):
            run_interruptible(lambda: calls.append("x"), is_done=lambda _: True)
    assert calls == []


def test_a_second_signal_is_heard_even_when_they_are_held() -> None:
    """The wait may never end."""
    with pytest.raises(Interrupted), defer_signals():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        signal.sigtimedwait([], SECONDS_MAX)


def test_handlers_are_as_they_were() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with defer_signals():
        run_interruptible(lambda: None, is_done=lambda _: True)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
