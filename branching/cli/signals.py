"""Signals end a call in order: what runs is killed, branches are aborted, then we exit.

A signal's handler only cancels the scope of the call, so no signal can break into it half-way: a
branch that was just made, a commit under way. The first signal leaves commands a moment to tidy
up, the second kills immediately.

A call with several candidates runs in a thread of its own, and the main thread only waits. A call
that supervises one process itself runs in the main thread (`has_thread=False`): the supervisor
waits for signals, too. There the third signal raises Interrupted wherever it comes.

While a workspace is opened and closed around the call, signals are deferred (`defer_signals`): a
mount that was made must be unmounted, a temporary home removed. A signal that came while it was
opened ends the call before it begins; one that comes while it is closed is too late to change
anything.

The main thread waits for the other by reading a pipe, into which Python writes each signal.
Waiting for the thread itself would lose the signal that comes just before the wait begins: it was
seen to happen.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from branching._cancellation import STOP_GRACE_SECONDS, CancelScope
from branching.cli.error_handling import Interrupted

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

R = TypeVar("R")

_held: list[int] = []
"""Signals that came while they were held."""


@contextmanager
def defer_signals() -> Iterator[None]:
    """Holds signals for the length of the `with`; a second one raises Interrupted all the same:
    somebody insists, and what we wait for may never end."""

    def hold(signum: int, _frame: FrameType | None) -> None:
        _held.append(signum)
        if len(_held) > 1:
            raise Interrupted(signum)

    before = {signum: signal.signal(signum, hold) for signum in _heard()}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        _held.clear()


def run_interruptible(
    function: Callable[[], R],
    *,
    is_done: Callable[[R], bool],
    has_thread: bool = True,
    hint: Callable[[], str | None] = lambda: None,
) -> R:
    """Calls `function` in a cancel scope, and returns its value.

    After a signal Interrupted is raised instead, unless `is_done` says that the value is worth
    more: what was committed when the signal came stays committed, and is reported.

    Args:
        function: The call.
        is_done: Tells whether its value is returned although a signal came.
        has_thread: Call it in a thread. Without one it must not wait for other threads.
        hint: Returns what to do after a signal.
    """
    if _held:
        raise Interrupted(_held[0])
    scope = CancelScope()
    received: list[int] = []

    def stop(signum: int, _frame: FrameType | None) -> None:
        scope.cancel(0.0 if received else STOP_GRACE_SECONDS)
        received.append(signum)
        if len(received) > 2 and not has_thread:
            raise Interrupted(signum)

    before = {signum: signal.signal(signum, stop) for signum in _heard()}
    received += _held  # it came just before the line above
    if received:
        scope.cancel(STOP_GRACE_SECONDS)
    try:
        value = _called_in_thread(scope, function) if has_thread else scope.run(function)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if received and not is_done(value):
        raise Interrupted(received[0], hint())
    return value


def _called_in_thread(scope: CancelScope, function: Callable[[], R]) -> R:
    values: list[R] = []
    errors: list[BaseException] = []
    waiting, bell = os.pipe()

    def call() -> None:
        try:
            values.append(scope.run(function))
        except BaseException as error:  # raised again by the main thread
            errors.append(error)
        finally:
            os.write(bell, b"\0")

    os.set_blocking(bell, False)
    wakeup_before = signal.set_wakeup_fd(bell)
    try:
        thread = threading.Thread(target=call, name="call")
        thread.start()
        while not values and not errors:
            os.read(waiting, 1)
        thread.join()
    finally:
        signal.set_wakeup_fd(wakeup_before)
        os.close(waiting)
        os.close(bell)
    if errors:
        raise errors[0]
    return values[0]


def _heard() -> list[signal.Signals]:
    # What the caller has us ignore (nohup, a shell's background job) stays ignored.
    return [signum for signum in STOP_SIGNALS if signal.getsignal(signum) != signal.SIG_IGN]
