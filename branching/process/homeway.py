"""How what a function returned, or raised, comes home: the way back from the sandbox.

The sandbox is not trusted, and neither are bytes that come from it: unpickled without care they
could run any code outside. So only values are accepted, whose making does nothing: those of plain
types, exceptions, and instances of the program's own classes. Nothing is imported for them, no
function of the program's is called (`making`). What else a function may return is up to the caller
to name (`accept`).

They travel in a file in memory, not in a pipe: the function never waits for a reader, and a result
may be as large as memory.
"""

from __future__ import annotations

import io
import os
import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from branching.errors import ProcessBranchError
from branching.process import courier, making

_REPR_CHARACTERS_MAX = 1000
_BLOCK_BYTES = 512
"""The unit of st_blocks."""


class RemoteTraceback(Exception):
    """The traceback of an exception that was raised in another process, as text: its cause."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came home."""

    value: object = None
    exception: BaseException | None = None


# In the sandbox.


def write_value(descriptor: int, value: object) -> None:
    """Sends home what the function returned; an error in its place if that cannot be."""
    try:
        data = _packed(("value", value))
    except Exception as error:  # whatever some object's __reduce__ raises
        text = f"{type(value).__name__} cannot be sent back: {error}; it is {_short(value)}"
        data = _packed(("unsendable", text, ""))
    _write(descriptor, data)


def write_exception(descriptor: int, error: BaseException) -> None:
    """Sends home what the function raised, with its traceback as text."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        data = _packed(("exception", type(error), error.args, _state_of(error), text))
    except Exception as reason:
        told = f"{type(error).__name__}: {error} (it cannot be sent back: {reason})"
        data = _packed(("unsendable", told, text))
    _write(descriptor, data)


class _Packer(pickle.Pickler):
    def persistent_id(self, thing: Any) -> Any:
        if isinstance(thing, type) or callable(thing):
            return courier.received.get(id(thing))
        return None


def _packed(thing: object) -> bytes:
    buffer = io.BytesIO()
    _Packer(buffer, protocol=5).dump(thing)
    return buffer.getvalue()


def _state_of(error: BaseException) -> dict[str, Any]:
    state = dict(error.__dict__)
    if isinstance(error, (ImportError, NameError, AttributeError)):
        for name in ("name", "path"):
            if isinstance(getattr(error, name, None), str):
                state[name] = getattr(error, name)
    return state


def _write(descriptor: int, data: bytes) -> None:
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)


def _short(value: object) -> str:
    try:
        return repr(value)[:_REPR_CHARACTERS_MAX]
    except Exception as error:
        return f"something whose repr raises {type(error).__name__}"


# At home.


def read(descriptor: int, originals: Sequence[object], accept: Sequence[type]) -> Outcome:
    """Returns what was written; nothing was if the function did not get so far."""
    found = os.fstat(descriptor)
    if found.st_size == 0:
        return Outcome()
    try:
        if found.st_blocks * _BLOCK_BYTES < found.st_size:
            # Holes cost the sandbox nothing, and would cost us memory.
            raise ValueError("it is not as large as it says")
        stream = io.BufferedReader(_Stream(descriptor, found.st_size))
        return _understood(making.load(stream, originals, accept))
    except making.NotAcceptedError as refused:
        error = ProcessBranchError(
            f"the target's result was not accepted: it has a {refused}, and bytes from a "
            "sandbox may not make one",
            hint="return plain data, or name the class in `accept`",
        )
    except Exception as unread:
        error = ProcessBranchError(f"the target's result cannot be read: {unread}")
    return Outcome(exception=error)


class _Stream(io.RawIOBase):
    """Reads the first `size` bytes of a file, without moving its position.

    The file may still be open in another sandbox, which received it over a socket. So it is read
    and not mapped: a file that shrinks ends early then, and does not end us (SIGBUS). It is never
    read beyond the size that it had when its own sandbox ended.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._size = size
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer)[: max(0, self._size - self._place)]
        count = os.preadv(self._descriptor, [wanted], self._place) if wanted else 0
        self._place += count
        return count

    def seek(self, place: int, whence: int = io.SEEK_SET) -> int:
        self._place = place + (self._place if whence == io.SEEK_CUR else 0)
        return self._place


def _understood(told: Any) -> Outcome:
    kind, *rest = told
    if kind == "value":
        return Outcome(value=rest[0])
    if kind == "exception":
        cls, args, state, text = rest
        return Outcome(exception=_made(cls, args, state, str(text)))
    message, text = map(str, rest)
    error = ProcessBranchError(message)
    if text:
        error.__cause__ = RemoteTraceback(text)
    return Outcome(exception=error)


def _made(cls: Any, args: Any, state: Any, text: str) -> BaseException:
    """Makes an exception again without calling an __init__ of the program's: it may take other
    arguments than it passes on.
    """
    if not (isinstance(cls, type) and issubclass(cls, BaseException) and isinstance(args, tuple)):
        raise TypeError("it is no exception")
    error: BaseException = making.bare(cls, args)
    error.args = args
    making.fill(error, state)
    error.__cause__ = RemoteTraceback(text)
    return error
