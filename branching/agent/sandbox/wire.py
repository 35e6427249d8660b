"""The protocol on the pipes: frames with a header (JSON) and a body (bytes).

    4 bytes length of the header, 4 bytes length of the body (big endian), header, body

A request has `id` and `op`; its reply has the same `id`. Both sides refuse longer frames.
"""

from __future__ import annotations

import json
import os
import struct
from typing import Any

FACTS_BYTES_MAX = 4 << 20
BODY_BYTES_MAX = 256 << 20
"""Of a file, or of the output of a command."""
_LENGTHS = struct.Struct(">II")


class BadFrame(Exception):
    """The other side does not keep to the protocol."""


def read_frame(descriptor: int) -> tuple[dict[str, Any], bytes] | None:
    """Reads one frame; None at the end of the stream. Raises BadFrame if it is invalid."""
    head = _read(descriptor, _LENGTHS.size)
    if not head:
        return None
    facts_length, body_length = _LENGTHS.unpack(head)
    if facts_length > FACTS_BYTES_MAX or body_length > BODY_BYTES_MAX:
        raise BadFrame("a frame is too long")
    try:
        facts = json.loads(_read(descriptor, facts_length))
    except ValueError as error:
        raise BadFrame("a frame has no facts") from error
    if not isinstance(facts, dict):
        raise BadFrame("the facts of a frame are not an object")
    return facts, _read(descriptor, body_length)


Frame = tuple[bytes, bytes]
"""An encoded frame: lengths and facts, and the body, which is not copied."""


def encode_frame(facts: dict[str, Any], body: bytes = b"") -> Frame:
    """Returns one frame as it is written. BadFrame if it is too long."""
    data = json.dumps(facts).encode()
    if len(data) > FACTS_BYTES_MAX or len(body) > BODY_BYTES_MAX:
        raise BadFrame("a frame is too long")
    return _LENGTHS.pack(len(data), len(body)) + data, body


def write_frame(descriptor: int, frame: Frame) -> None:
    """Writes one frame, and waits until all of it is in the pipe."""
    for part in frame:
        left = memoryview(part)
        while left:
            left = left[os.write(descriptor, left) :]


def _read(descriptor: int, length: int) -> bytes:
    """Reads so many bytes; fewer only at the end of the stream before the first of them."""
    parts: list[bytes] = []
    left = length
    while left:
        part = os.read(descriptor, min(left, 1 << 20))
        if not part:
            if parts:
                raise BadFrame("a frame breaks off")
            return b""
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
