"""Open files on their way to another process.

The kernel counts those that were sent and not yet received, of all programs of a user, and refuses
to pass on more than the sender may have open (unix(7), ETOOMANYREFS). Many sandboxes that start at
once come to that; whoever is to receive them does so soon.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Sequence

WAIT_SECONDS_MAX = 60.0
"""Receivers wait for a processor, on a busy machine; nobody waits for one that never receives."""
_PAUSE_SECONDS = 0.002


def send(stream: socket.socket, message: bytes, descriptors: Sequence[int]) -> None:
    """Sends a message and descriptors, once there is room for them. OSError if there is none, or
    nobody to receive them."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while True:
        try:
            socket.send_fds(stream, [message], descriptors)
            return
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS or time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE_SECONDS)
