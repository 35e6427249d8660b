"""Ctrl-C, at a moment of ours: it breaks into whatever the main thread is doing otherwise, also
between the making of something and the note that it is there to be undone.

A program that hears SIGINT in a way of its own is left to it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def defer_sigint(on_interrupt: Callable[[bool], None] | None = None) -> Iterator[None]:
    """Raises KeyboardInterrupt at the end of the `with` instead of in its middle.

    `on_interrupt` is called meanwhile, to bring the end about; True says that it is not the first.
    The third is raised at once: somebody insists, and what is waited for may never end.
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
