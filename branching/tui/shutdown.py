"""How an application on a terminal ends when it is told to: in order, the terminal restored.

Where the terminal is gone there is nothing to restore, and what is still drawn must go nowhere:
the thread that writes to it dies with the first error, and whoever went on handing it something
would wait for ever.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

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
