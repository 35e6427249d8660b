"""Sends file descriptors to another process over a Unix socket (SCM_RIGHTS).

One message carries at most DESCRIPTORS_MAX descriptors; more are sent in several messages. The
kernel counts the descriptors of a user that were sent and not yet received. It refuses to send more
than the sender may have open (unix(7), ETOOMANYREFS). Many sandboxes that start concurrently reach
that limit, so sending waits for the receivers.
"""

from __future__ import annotations

import array
import errno
import socket
import time
from collections.abc import Sequence

DESCRIPTORS_MAX = 250
"""One message takes no more (the kernel's SCM_MAX_FD is 253)."""
WAIT_SECONDS_MAX = 60.0
"""On a busy machine a receiver waits for a processor; a longer wait means that it is stuck."""

_PAUSE_SECONDS = 0.002
_MORE = b"more"
_MESSAGE_BYTES_MAX = 4200
"""The longest path, and some words."""
_ANCILLARY_BYTES_MAX = socket.CMSG_LEN(DESCRIPTORS_MAX * array.array("i").itemsize)


def send(stream: socket.socket, message: bytes, descriptors: Sequence[int]) -> None:
    """Sends a message with any number of descriptors; waits while too many are in flight.

    Args:
        stream: A connected Unix socket.
        message: At most 4200 bytes, and not `b"more"`.
        descriptors: The receiver gets duplicates. They stay open here.

    Raises:
        OSError: There was no room within WAIT_SECONDS_MAX, or the peer has closed the socket. The
            receiver may have got some of the descriptors without the message.
    """
    while len(descriptors) > DESCRIPTORS_MAX:
        _send_one(stream, _MORE, descriptors[:DESCRIPTORS_MAX])
        descriptors = descriptors[DESCRIPTORS_MAX:]
    _send_one(stream, message, descriptors)


def receive(stream: socket.socket) -> tuple[bytes, list[int]]:
    """Waits for one message of `send`.

    Returns:
        The message, empty if the sender is gone, and its descriptors, close-on-exec.
    """
    received = array.array("i")
    while True:
        message, ancillary, _, _ = stream.recvmsg(
            _MESSAGE_BYTES_MAX, _ANCILLARY_BYTES_MAX, socket.MSG_CMSG_CLOEXEC
        )
        for _, _, descriptors in ancillary:
            received.frombytes(descriptors)
        if message != _MORE:
            return message, list(received)


def _send_one(stream: socket.socket, message: bytes, descriptors: Sequence[int]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while True:
        try:
            socket.send_fds(stream, [message], descriptors)
            return
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS or time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE_SECONDS)
