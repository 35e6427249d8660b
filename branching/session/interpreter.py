"""The caller's side of one interpreter: the session's own, or that of a child."""

from __future__ import annotations

import array
import io
import json
import math
import os
import pickle
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from branching._linux import fd_passing
from branching.errors import MemoryBranchError
from branching.process.functions import function_pickle, result_channel
from branching.session.cell import Cell

OUTPUT_BYTES_MAX = 16 << 20
"""Of each output stream, as a cell keeps it. The functions that take output get all."""
INTERRUPT_SECONDS_MAX = 5.0
"""Time for code to end after an interrupt, before its process is killed."""
ANSWER_SECONDS_MAX = 60.0
"""For what takes milliseconds: a worker that does not answer is stuck in the kernel."""
_WAIT_SECONDS_MAX = 0.5
"""A signal that arrives just before poll(2) begins does not end it. Its handler runs after this."""

_CREDENTIALS = struct.Struct("=iII")
_READ_BYTES = 1 << 16

OutputFunction = Callable[[bytes], None]


class Ends:
    """The descriptors of one interpreter: three of ours, three that it is to get."""

    def __init__(self) -> None:
        self.control, self.its_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.output, self.its_output = os.pipe2(os.O_CLOEXEC)
        self.errors, self.its_errors = os.pipe2(os.O_CLOEXEC)
        for ours in (self.output, self.errors):
            os.set_blocking(ours, False)

    def its(self) -> list[int]:
        """Returns the descriptors for the interpreter: control, output, errors."""
        return [self.its_control.fileno(), self.its_output, self.its_errors]

    def close_its(self) -> None:
        """Closes them here."""
        self.its_control.close()
        os.close(self.its_output)
        os.close(self.its_errors)


class Interpreter:
    """One interpreter. A lock lets one thread at a time ask it something."""

    def __init__(self, ends: Ends, name: str, sinks: Sequence[OutputFunction | None]) -> None:
        self.name = name
        """What messages call it."""
        self.process = -1
        """A pidfd, once it has said that it is here."""
        self.pid = -1
        self.python = ""
        """The interpreter's `sys.implementation.cache_tag`, once it is here."""
        self.mount = 0
        """The number of the branch that it sees, for the mount helper; 0 before it sees one."""
        self.busy = threading.Lock()
        self.end_reason = ""
        """Why we ended it, for those who still wait for it."""
        self.explain: Callable[[], str] = lambda: ""
        """Returns why it has ended, if it was not us."""
        self._control = ends.control
        self._outputs = {ends.output: 0, ends.errors: 1}
        self._sinks = sinks
        self._kept: list[bytearray] = [bytearray(), bytearray()]

    def await_here(self) -> None:
        """Waits until it runs and has, if it is a child, a mount table of its own."""
        try:
            self.python = str(self._answer()["python"])
        except MemoryBranchError as error:
            self._drain()
            printed = bytes(self._kept[1]).decode("utf-8", "replace").strip()
            if printed:  # by an interpreter that cannot start
                raise MemoryBranchError(f"{error.message}. It printed: {printed}") from None
            raise

    def run(
        self,
        packed: bytes,
        originals: Sequence[object],
        accept: Sequence[type],
        timeout: float | None,
    ) -> Cell:
        """Runs a request for `worker`. TimeoutError after `timeout` seconds."""
        request = os.memfd_create("request", os.MFD_CLOEXEC)
        result = result_channel.new_file()
        try:
            with open(request, "wb", closefd=False) as file:
                file.write(packed)
            os.lseek(request, 0, os.SEEK_SET)
            self._kept = [bytearray(), bytearray()]
            started_at = time.monotonic()
            self._send(b"run", [request, result])
            words = self._await_cell(timeout)
            seconds = time.monotonic() - started_at
            self._drain()
            outcome = result_channel.read(result, originals, accept)
        finally:
            os.close(request)
            os.close(result)
        stdout, stderr = (bytes(kept).decode("utf-8", "replace") for kept in self._kept)
        has_raised = words["raised"]
        return Cell(
            value=outcome.value,
            text=str(words["text"]),
            exception=outcome.exception if has_raised else None,
            value_error=None if has_raised else outcome.exception,
            stdout=stdout,
            stderr=stderr,
            wall_seconds=seconds,
        )

    def ask(self, request: bytes, descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """Sends a request, and returns the answer.

        Raises:
            MemoryBranchError: It failed, or the process has ended.
        """
        self._send(request, descriptors)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        try:
            return self._receive(ANSWER_SECONDS_MAX)
        except TimeoutError as error:
            raise MemoryBranchError(
                str(error), hint="its process hangs: interrupt it, or abort the session"
            ) from None

    def interrupt(self) -> None:
        """Raises KeyboardInterrupt in the code that runs."""
        self._signal(signal.SIGINT)

    def kill(self, reason: str) -> None:
        """Kills the process itself. Does not wait."""
        self.end_reason = reason
        self._signal(signal.SIGKILL)

    def has_ended(self, seconds: float = 0) -> bool:
        """Whether the process is dead, or dies within some time."""
        if self.process < 0:
            return False
        poll = select.poll()
        poll.register(self.process, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def await_end(self) -> None:
        """Waits until the killed process is dead."""
        if self.process >= 0 and not self.has_ended(ANSWER_SECONDS_MAX):
            raise MemoryBranchError(
                f"process {self.pid} does not die: it was killed and hangs inside the kernel",
                hint=f"see /proc/{self.pid}/stack for what it waits for",
            )

    def close(self) -> None:
        """Closes the descriptors. The process must be dead."""
        self._control.close()
        for descriptor in self._outputs:
            os.close(descriptor)
        self._outputs.clear()
        if self.process >= 0:
            os.close(self.process)
            self.process = -1

    def _signal(self, number: int) -> None:
        if self.process >= 0:
            try:
                signal.pidfd_send_signal(self.process, number)
            except ProcessLookupError:
                pass  # it has ended

    def _await_cell(self, timeout: float | None) -> dict[str, Any]:
        try:
            return self._receive(timeout)
        except TimeoutError:
            self.interrupt()
        try:
            self._receive(INTERRUPT_SECONDS_MAX)
        except TimeoutError:
            self.kill(f"it did not react to an interrupt after its time of {timeout:g} s")
            raise self.ended_error() from None
        raise TimeoutError(f"the code did not end within {timeout:g} s, and was interrupted")

    def _send(self, request: bytes, descriptors: Sequence[int]) -> None:
        try:
            fd_passing.send(self._control, request, descriptors)
        except OSError:
            raise self.ended_error() from None

    def _receive(self, timeout: float | None) -> dict[str, Any]:
        """Waits for an answer, and passes on output meanwhile."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        poll = select.poll()
        for descriptor in (self._control.fileno(), *self._outputs):
            poll.register(descriptor, select.POLLIN)
        while True:
            left = min(_WAIT_SECONDS_MAX, max(0.0, deadline - time.monotonic()))
            ready = {found for found, _ in poll.poll(left * 1000 + 1)}
            if not ready and time.monotonic() >= deadline:
                raise TimeoutError(f"{self.name} does not answer")
            for descriptor in ready & self._outputs.keys():
                if not self._read(descriptor):
                    poll.unregister(descriptor)
            if self._control.fileno() in ready:
                return self._taken()

    def _taken(self) -> dict[str, Any]:
        try:
            message, ancillary, _, _ = self._control.recvmsg(
                _READ_BYTES,
                socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(array.array("i").itemsize),
                socket.MSG_CMSG_CLOEXEC,
            )
        except OSError:
            message, ancillary = b"", []
        for _, kind, data in ancillary:
            if kind == socket.SCM_RIGHTS:  # it was not asked for any
                for descriptor in array.array("i", data):
                    os.close(descriptor)
            elif kind == socket.SCM_CREDENTIALS and self.process < 0 and message:
                self.pid = _CREDENTIALS.unpack(data)[0]
                with suppress(ProcessLookupError):  # it may have said why it ends
                    self.process = os.pidfd_open(self.pid)
        if not message:
            raise self.ended_error()
        try:
            words = json.loads(message)
        except ValueError:
            words = {"failed": "it sent an invalid answer"}
        if "failed" in words:
            raise MemoryBranchError(f"{self.name}: {words['failed']}")
        if self.process < 0:
            raise self.ended_error()
        return dict(words)

    def ended_error(self) -> MemoryBranchError:
        """Returns the error for those who ask a process that has ended."""
        reason = self.end_reason or self.explain()
        return MemoryBranchError(
            f"{self.name} has ended{f': {reason}' if reason else ' (it exited, or was killed)'}"
        )

    def _read(self, descriptor: int) -> bool:
        """Takes what has arrived. False at the end of the stream."""
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return True
        index = self._outputs[descriptor]
        kept = self._kept[index]
        kept += data[: max(0, OUTPUT_BYTES_MAX - len(kept))]
        sink = self._sinks[index]
        if data and sink is not None:
            sink(data)
        return bool(data)

    def _drain(self) -> None:
        """Takes what was written before the code ended."""
        for descriptor in self._outputs:
            before = -1
            while before != len(self._kept[self._outputs[descriptor]]):
                before = len(self._kept[self._outputs[descriptor]])
                self._read(descriptor)


def packed_code(code: str) -> bytes:
    """Returns a request to execute code."""
    return pickle.dumps(("code", code))


def packed_call(
    function: Callable[..., object], arguments: Sequence[object]
) -> tuple[bytes, Sequence[object]]:
    """Returns a request to call a function, and the objects that it was sent with by value."""
    packed = function_pickle.pack(function, *arguments)
    buffer = io.BytesIO()
    pickle.dump(("call", packed.data), buffer)
    return buffer.getvalue(), packed.originals
