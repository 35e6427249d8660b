"""One message with any number of descriptors, over a socket that carries some 250 at a time."""

from __future__ import annotations

import array
import socket
from collections.abc import Sequence

from branching.process.sandbox import handover

DESCRIPTORS_MAX = 250
"""One message takes no more (the kernel's SCM_MAX_FD is 253)."""

_MORE = b"more"
_MESSAGE_BYTES_MAX = 64
_ANCILLARY_BYTES_MAX = socket.CMSG_LEN(DESCRIPTORS_MAX * array.array("i").itemsize)


def send(stream: socket.socket, message: bytes, descriptors: Sequence[int]) -> None:
    """Sends it, once there is room. OSError if there is none, or the other side is gone."""
    while len(descriptors) > DESCRIPTORS_MAX:
        handover.send(stream, _MORE, descriptors[:DESCRIPTORS_MAX])
        descriptors = descriptors[DESCRIPTORS_MAX:]
    handover.send(stream, message, descriptors)


def receive(stream: socket.socket) -> tuple[bytes, list[int]]:
    """Waits for one. An empty message: the other side is gone. No program that is executed
    inherits the descriptors.
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
