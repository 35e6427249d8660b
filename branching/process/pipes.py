"""The pipes for the output and the score of one process.

The thread that supervises the process reads the pipes and passes the data to functions. All reads
are non-blocking. After the end of the process, `drain` reads the data that is left.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Mapping

from branching.process.bounded_output import OutputTail
from branching.process.run_as import Owner

Sink = Callable[[bytes], None] | int | None
"""Target of an output: a function that receives the bytes, a descriptor, or None to inherit."""

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
        self._child_ends: dict[int, int] = {}
        self._score = OutputTail(SCORE_BYTES_MAX)
        self.score: int | None = None
        """The write end of the score pipe."""
        try:
            for number, sink in sinks.items():
                if callable(sink):
                    # One function for both outputs gets one pipe, which preserves the order.
                    shared = number == 2 and sink == sinks[1]
                    self._child_ends[number] = self._child_ends[1] if shared else self._open(sink)
            if score:
                self.score = self._open(score if callable(score) else self._score.feed)
        except BaseException:
            self.__exit__()
            raise

    def child_end(self, number: int) -> int | None:
        sink = self._sinks[number]
        return self._child_ends[number] if callable(sink) else sink

    def readable(self) -> list[int]:
        return list(self._readers)

    def read(self, descriptor: int) -> bool:
        """Reads the available data. Returns False at the end of the stream."""
        try:
            arrived = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return True
        if arrived:
            self._readers[descriptor](arrived)
        return bool(arrived)

    def drain(self) -> None:
        """Reads the data that is left after the process has ended."""
        for descriptor, reader in self._readers.items():
            taken = 0
            while taken < _DRAIN_BYTES_MAX:
                try:
                    arrived = os.read(descriptor, _READ_BYTES)
                except BlockingIOError:
                    break
                if not arrived:
                    break
                reader(arrived)
                taken += len(arrived)

    def score_text(self) -> str:
        return self._score.text.strip()

    def close_readable(self, descriptor: int) -> None:
        del self._readers[descriptor]
        os.close(descriptor)

    def close_child_ends(self) -> None:
        for descriptor in {
            *self._child_ends.values(),
            *([] if self.score is None else [self.score]),
        }:
            os.close(descriptor)
        self._child_ends.clear()
        self.score = None

    def __enter__(self) -> Pipes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_child_ends()
        for descriptor in self.readable():
            self.close_readable(descriptor)

    def _open(self, reader: Callable[[bytes], None]) -> int:
        ours, childs = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(ours, False)
        self._readers[ours] = reader
        if self._owner is not None:
            # Opening /dev/stdout or /proc/self/fd/N checks the permissions of the pipe.
            os.fchown(childs, self._owner.uid, self._owner.gid)
        return childs


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all data; waits as long as the descriptor is not writable."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            select.select([], [descriptor], [])  # another process has set O_NONBLOCK
