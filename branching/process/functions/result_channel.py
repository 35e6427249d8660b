"""How what a function returned, or raised, comes home: the way back from the sandbox.

The sandbox is not trusted, and neither are bytes that come from it: unpickled without care they
could run any code outside. So only values are accepted, whose making does nothing: those of plain
types, exceptions, and instances of the program's own classes. Nothing is imported for them, no
function of the program's is called (`safe_unpickle`). What else a function may return is up to
the caller to name (`accept`).

They travel in a file in memory, not in a pipe: the function never waits for a reader. When all of
its sandbox is dead the file is sealed, so that no other sandbox that received it over a socket
can change the result. It is read as a stream, without a second copy of its bytes in memory.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import pickle
import struct
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from branching.errors import ProcessBranchError
from branching.process.functions import function_pickle, safe_unpickle

RESULT_BYTES_MAX = 1 << 30
"""Of what a function returns or raises, as it is sent. Larger data belongs in a file of the
branch."""
_REPR_CHARACTERS_MAX = 1000
_TRACEBACK_CHARACTERS_MAX = 100_000
_BLOCK_BYTES = 512
"""The unit of st_blocks."""
_LENGTH = struct.Struct("<Q")
"""Stands before the result and is written after it: 0 where the function did not get so far."""
_FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class RemoteTraceback(Exception):
    """The traceback of an exception that was raised in another process, as text: its cause."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True, kw_only=True)
class CallOutcome:
    """What came home."""

    value: object = None
    exception: BaseException | None = None


# In the sandbox.


def write_value(descriptor: int, value: object) -> None:
    """Sends home what the function returned; an error in its place if that cannot be."""
    try:
        _write(descriptor, ("value", value))
    except _TooLargeError as error:  # so would its text be
        text = f"{type(value).__name__} cannot be sent back: {error}"
        _write(descriptor, ("unsendable", text, ""))
    except Exception as error:  # whatever some object's __reduce__ raises
        text = f"{type(value).__name__} cannot be sent back: {error}; it is {_short(value)}"
        _write(descriptor, ("unsendable", text, ""))


def write_exception(descriptor: int, error: BaseException) -> None:
    """Sends home what the function raised, with its traceback as text."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        _write(descriptor, ("exception", type(error), error.args, _state_of(error), text))
    except Exception as reason:
        text = text[-_TRACEBACK_CHARACTERS_MAX:]
        short = f"{type(error).__name__}: {str(error)[:_REPR_CHARACTERS_MAX]}"
        _write(descriptor, ("unsendable", f"{short} (it cannot be sent back: {reason})", text))


class _Packer(pickle.Pickler):
    def persistent_id(self, thing: Any) -> Any:
        if isinstance(thing, type) or callable(thing):
            return function_pickle.received.get(id(thing))
        return None


class _TooLargeError(Exception):
    """A result has more than RESULT_BYTES_MAX bytes."""


class _Bounded(io.FileIO):
    """A file that takes RESULT_BYTES_MAX bytes and no more."""

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > RESULT_BYTES_MAX:
            raise _TooLargeError(
                f"it has more than {RESULT_BYTES_MAX >> 20} MiB; write it to a file in the branch, "
                "and return the name of the file"
            )
        return super().write(data)


def _write(descriptor: int, thing: object) -> None:
    """Makes the thing the file's content."""
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, _LENGTH.size, os.SEEK_SET)
    with io.BufferedWriter(_Bounded(descriptor, "wb", closefd=False)) as file:
        _Packer(file, protocol=5).dump(thing)
    length = os.fstat(descriptor).st_size - _LENGTH.size
    os.pwrite(descriptor, _LENGTH.pack(length), 0)


def _state_of(error: BaseException) -> dict[str, Any]:
    state = dict(error.__dict__)
    if isinstance(error, (ImportError, NameError, AttributeError)):
        for name in ("name", "path"):
            if isinstance(getattr(error, name, None), str):
                state[name] = getattr(error, name)
    return state


def _short(value: object) -> str:
    try:
        return repr(value)[:_REPR_CHARACTERS_MAX]
    except Exception as error:
        return f"something whose repr raises {type(error).__name__}"


# At home.


def new_file() -> int:
    """Returns the descriptor of a file for one result."""
    return os.memfd_create("result", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def read(descriptor: int, originals: Sequence[object], accept: Sequence[type]) -> CallOutcome:
    """Returns the written outcome; an empty one if the function did not return.

    All processes of the sandbox must be dead.
    """
    try:
        _seal(descriptor)
        found = os.fstat(descriptor)
        (length,) = _LENGTH.unpack(os.pread(descriptor, _LENGTH.size, 0).ljust(_LENGTH.size, b"\0"))
        if length == 0:
            return CallOutcome()
        size = found.st_size - _LENGTH.size
        if found.st_blocks * _BLOCK_BYTES < found.st_size or length != size:
            # Holes cost the sandbox nothing, and would cost us memory.
            raise ValueError("its size is not the size that it states")
        if size > RESULT_BYTES_MAX:
            raise ValueError(f"it has more than {RESULT_BYTES_MAX >> 20} MiB")
        stream = io.BufferedReader(_Stream(descriptor))
        return _understood(safe_unpickle.load(stream, originals, accept))
    except safe_unpickle.NotAcceptedError as refused:
        error = ProcessBranchError(
            f"the target's result was not accepted: it has a {refused}, which data from a sandbox "
            "must not create",
            hint="return plain data, or name the class in `accept`",
        )
    except Exception as unread:
        error = ProcessBranchError(f"the target's result cannot be read: {unread}")
    return CallOutcome(exception=error)


def _seal(descriptor: int) -> None:
    """Makes the file unchangeable. OSError if another process can still change it."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FIXED | fcntl.F_SEAL_SEAL)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise OSError(
                "another process, which received it, has it mapped for writing"
            ) from error
        # The sandbox may have sealed it itself.
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _FIXED != _FIXED:
            raise


class _Stream(io.RawIOBase):
    """Reads the result in a file, without moving the file's own position.

    It is not mapped: bytes that went missing would end us (SIGBUS).
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = os.preadv(self._descriptor, [buffer], self._place + _LENGTH.size)
        self._place += count
        return count

    def seek(self, place: int, whence: int = io.SEEK_SET) -> int:
        self._place = place + (self._place if whence == io.SEEK_CUR else 0)
        return self._place


def _understood(told: Any) -> CallOutcome:
    kind, *rest = told
    if kind == "value":
        return CallOutcome(value=rest[0])
    if kind == "exception":
        cls, args, state, text = rest
        return CallOutcome(exception=_rebuild_exception(cls, args, state, str(text)))
    message, text = map(str, rest)
    error = ProcessBranchError(message)
    if text:
        error.__cause__ = RemoteTraceback(text)
    return CallOutcome(exception=error)


def _rebuild_exception(cls: Any, args: Any, state: Any, text: str) -> BaseException:
    """Makes an exception again without calling an __init__ of the program's: it may take other
    arguments than it passes on.
    """
    if not (isinstance(cls, type) and issubclass(cls, BaseException) and isinstance(args, tuple)):
        raise TypeError("it is not an exception")
    error: BaseException = safe_unpickle.construct(cls, args)
    error.args = args
    safe_unpickle.restore_state(error, state)
    error.__cause__ = RemoteTraceback(text)
    return error
