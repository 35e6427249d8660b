"""The terminal of an application: restored when a signal ends it, and lent to other programs.

A terminal that is gone cannot be restored, and nothing may be drawn on it: the thread that writes
to it ends with the first error, and what goes on passing data to that thread would never return.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from textual.app import App, SuspendNotSupported
from textual.drivers.linux_driver import LinuxDriver

from branching._exit_codes import EXIT_SIGNAL_BASE


class TerminalDriver(LinuxDriver):
    """Textual's driver, which draws nothing on a terminal that was closed."""

    is_hung_up = False

    def write(self, data: str) -> None:
        """Draws."""
        writer = self._writer_thread
        if not TerminalDriver.is_hung_up and (writer is None or writer.is_alive()):
            super().write(data)


def leave_on_signals(leave: Callable[[int], object]) -> None:
    """Has SIGTERM, and SIGHUP of a terminal that was closed, call `leave` with our exit code.

    What the caller has us ignore (nohup) stays ignored.
    """

    def shut_down(number: signal.Signals) -> None:
        TerminalDriver.is_hung_up = number == signal.SIGHUP
        leave(EXIT_SIGNAL_BASE + number)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, shut_down, number)


R = TypeVar("R")


async def suspended_terminal(app: App[Any], errand: Callable[[], Awaitable[R]]) -> R:
    """Gives the terminal up for as long as the errand takes; returns what it returns."""
    value: R
    failure: BaseException | None = None
    # Ctrl-C is for the program in front. A handler of ours, unlike SIG_IGN, is not inherited.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        with app.suspend():
            try:
                value = await errand()
            except BaseException as error:  # raised below: the terminal is taken back first
                failure = error
    except SuspendNotSupported:  # there is no terminal
        return await errand()
    finally:
        signal.signal(signal.SIGINT, before)
    app.refresh(repaint=True, layout=True)
    if failure is not None:
        raise failure
    return value
