"""The pipes for the output and the score of one process.

The thread that supervises the process reads the pipes. It passes the data to functions, or forwards
it to another descriptor (`Forward`). It never waits for one pipe alone: all reads are non-blocking,
and a write is made only when the descriptor accepts it. While a descriptor accepts nothing, the
pipe in front of it is not read. After the end of the process, `drain` reads the data that is left.
"""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable, Mapping

from branching.errors import ProcessBranchError
from branching.process.bounded_output import OutputTail
from branching.process.run_as import Owner

_ATOMIC_BYTES = 4096
"""What a pipe that is writable accepts without blocking (PIPE_BUF)."""


class Forward:
    """Forwards an output to a descriptor of this process, and passes a copy to a function.

    Args:
        to: The descriptor.
        keep: Receives the bytes when they arrive, and empty bytes at the end of the output.
    """

    def __init__(self, to: int, keep: Callable[[bytes], None]) -> None:
        self.to = to
        self._keep = keep
        self._unwritten = memoryview(b"")
        self.failure: OSError | None = None
        """Why the descriptor took no more; None for a closed pipe (EPIPE)."""
        self.is_broken = False

    @property
    def is_full(self) -> bool:
        """Whether data waits until the descriptor accepts it."""
        return bool(self._unwritten)

    def feed(self, arrived: bytes) -> None:
        """Passes on a copy, and forwards what the descriptor accepts."""
        self._keep(arrived)
        if not self.is_broken:
            self._unwritten = memoryview(arrived)
            self.flush()

    def flush(self) -> None:
        """Writes the data that waits, as far as the descriptor accepts it."""
        try:
            while self._unwritten and select.select([], [self.to], [], 0)[1]:
                written = os.write(self.to, self._unwritten[:_ATOMIC_BYTES])
                self._unwritten = self._unwritten[written:]
        except BlockingIOError:
            pass  # another process has set O_NONBLOCK, and was faster
        except OSError as error:
            self.is_broken = True
            self._unwritten = memoryview(b"")
            if error.errno != errno.EPIPE:
                self.failure = error

    def finish(self) -> None:
        """Reports the end of the output to the function."""
        self._keep(b"")


Sink = Callable[[bytes], None] | Forward | int | None
"""Target of an output: a function that receives the bytes, a descriptor to forward them to, a
descriptor for the process itself, or None to inherit."""

SCORE_BYTES_MAX = 4096
"""Only the last bytes written to the score descriptor are kept."""

_READ_BYTES = 65536
_DRAIN_BYTES_MAX = 1 << 20
"""Limit for `drain`, above a pipe's capacity, in case another process goes on writing."""


class Pipes:
    """The pipes of one process. Closed at the end of the `with`."""

    def __init__(
        self,
        sinks: Mapping[int, Sink],
        owner: Owner | None,
        score: bool | Callable[[bytes], None] = False,
    ) -> None:
        self._sinks = sinks
        self._owner = owner
        self._readers: dict[int, Callable[[bytes], None]] = {}
        self._forwards: dict[int, Forward] = {}
        self._child_ends: dict[int, int] = {}
        self._score = OutputTail(SCORE_BYTES_MAX)
        self.score: int | None = None
        """The write end of the score pipe."""
        try:
            for number, sink in sinks.items():
                if sink is not None and not isinstance(sink, int):
                    # One target for both outputs gets one pipe, which preserves the order.
                    shared = number == 2 and sink == sinks[1]
                    self._child_ends[number] = self._child_ends[1] if shared else self._open(sink)
            if score:
                self.score = self._open(score if callable(score) else self._score.feed)
        except BaseException:
            self.__exit__()
            raise

    def child_end(self, number: int) -> int | None:
        sink = self._sinks[number]
        return sink if sink is None or isinstance(sink, int) else self._child_ends[number]

    def register(self, poll: select.poll) -> None:
        """Registers what `handle` waits for."""
        for descriptor in self._readers:
            forward = self._forwards.get(descriptor)
            if forward is not None and forward.is_full:
                poll.register(forward.to, select.POLLOUT)
            else:
                poll.register(descriptor, select.POLLIN)

    def handle(self, ready: set[int]) -> None:
        """Reads what has arrived, and writes what can be written."""
        for descriptor in list(self._readers):
            forward = self._forwards.get(descriptor)
            if forward is not None and forward.is_full:
                if forward.to in ready:
                    forward.flush()
            elif descriptor in ready:
                self._read(descriptor)
            if forward is not None and forward.is_broken:
                self._close(descriptor)  # the process gets SIGPIPE at its next write

    def drain(self) -> bool:
        """Reads the data that is left after the process has ended.

        Returns:
            False if some of it waits until a descriptor accepts it.
        """
        for descriptor in list(self._readers):
            forward = self._forwards.get(descriptor)
            taken = 0
            while taken < _DRAIN_BYTES_MAX and not (forward and forward.is_full):
                arrived = self._read(descriptor)
                if not arrived:
                    break
                taken += arrived
        return not any(forward.is_full for forward in self._forwards.values())

    def score_text(self) -> str:
        return self._score.text.strip()

    def close_child_ends(self) -> None:
        for descriptor in {
            *self._child_ends.values(),
            *([] if self.score is None else [self.score]),
        }:
            os.close(descriptor)
        self._child_ends.clear()
        self.score = None

    def finish(self) -> None:
        """Closes the pipes.

        Raises:
            ProcessBranchError: Data could not be forwarded. A closed pipe (EPIPE) is no error.
        """
        failures = [forward.failure for forward in self._sinks_to_forward() if forward.failure]
        self.__exit__()
        if failures:
            raise ProcessBranchError(
                f"what the command printed could not be written: {failures[0].strerror}"
            ) from failures[0]

    def __enter__(self) -> Pipes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_child_ends()
        for descriptor in list(self._readers):
            self._close(descriptor)

    def _sinks_to_forward(self) -> list[Forward]:
        return [sink for sink in self._sinks.values() if isinstance(sink, Forward)]

    def _open(self, sink: Callable[[bytes], None] | Forward) -> int:
        ours, childs = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(ours, False)
        if isinstance(sink, Forward):
            self._forwards[ours] = sink
            self._readers[ours] = sink.feed
        else:
            self._readers[ours] = sink
        if self._owner is not None:
            # Opening /dev/stdout or /proc/self/fd/N checks the permissions of the pipe.
            os.fchown(childs, self._owner.uid, self._owner.gid)
        return childs

    def _read(self, descriptor: int) -> int:
        """Reads the available data, and closes the pipe at its end. Returns the number of bytes."""
        try:
            arrived = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return 0
        if arrived:
            self._readers[descriptor](arrived)
        else:
            self._close(descriptor)
        return len(arrived)

    def _close(self, descriptor: int) -> None:
        del self._readers[descriptor]
        forward = self._forwards.pop(descriptor, None)
        os.close(descriptor)
        if forward is not None:
            forward.finish()


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all data; waits as long as the descriptor is not writable."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            select.select([], [descriptor], [])  # another process has set O_NONBLOCK
