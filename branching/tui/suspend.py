"""Lending the terminal to another program: an editor, while the application waits behind it.

The event loop goes on, and so do runs; nothing is drawn, and no key is ours, until it is back.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from textual.app import App, SuspendNotSupported

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
