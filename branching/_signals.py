"""Defers KeyboardInterrupt (Ctrl-C) to a safe point.

Otherwise it could interrupt the main thread after an object was created and before its clean-up was
registered. A program with its own SIGINT handler is not affected.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def defer_sigint(on_interrupt: Callable[[bool], None] | None = None) -> Iterator[None]:
    """Raises KeyboardInterrupt at the end of the `with` instead of inside.

    The third Ctrl-C is raised immediately, in case the block never ends.

    Args:
        on_interrupt: Called at each Ctrl-C, to end the block sooner. The argument is False for the
            first one.
    """
    is_raised_here = threading.current_thread() is threading.main_thread()
    if not is_raised_here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    heard = 0

    def hear(_signum: int, _frame: object) -> None:
        nonlocal heard
        heard += 1
        if heard > 2:
            raise KeyboardInterrupt
        if on_interrupt is not None:
            on_interrupt(heard == 2)

    signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if heard:
            raise KeyboardInterrupt
