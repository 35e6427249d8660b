"""The outer end of a pseudo-terminal."""

from __future__ import annotations

import os
import select
import time


def read_until(terminal: int, text: bytes | None, seconds: float) -> bytes:
    """Reads what the terminal shows, up to a text or the end."""
    said = b""
    deadline = time.monotonic() + seconds
    while text is None or text not in said:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, said
        try:
            more = os.read(terminal, 4096)
        except OSError:  # how Linux says that the other side is closed
            break
        if not more:
            break
        said += more
    return said
