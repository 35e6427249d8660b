"""A line that moves on a terminal while a step of a command takes long."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

_DELAY_SECONDS = 1.0
"""A shorter step shows nothing."""
_FRAME_SECONDS = 0.2
_FRAMES, _ASCII_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "|/-\\"


@contextmanager
def shown_activity(what: str) -> Iterator[None]:
    """Shows `what` with the elapsed time on standard error for the length of the `with`.

    Does nothing if standard error is not a terminal.

    Args:
        what: The step: "committing".
    """
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_draw, args=(what, ended), name="activity", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def is_utf8(encoding: str | None) -> bool:
    """Returns whether a stream of this encoding can print any character."""
    return (encoding or "").lower().replace("-", "") == "utf8"


def spinner_frames(encoding: str | None) -> str:
    """Returns the characters of which one after another is drawn on a terminal."""
    return _FRAMES if is_utf8(encoding) else _ASCII_FRAMES


def _draw(what: str, ended: threading.Event) -> None:
    begun = time.monotonic()
    if ended.wait(_DELAY_SECONDS):
        return
    for frame in cycle(spinner_frames(sys.stderr.encoding)):
        text = f"\r{frame} {what}: {time.monotonic() - begun:.0f} s"
        print(text, end="", file=sys.stderr, flush=True)
        if ended.wait(_FRAME_SECONDS):
            break
    print("\r\x1b[K", end="", file=sys.stderr, flush=True)
