"""The pipes between us and one process: what it prints, and its score.

Functions are handed what arrives, by the thread that attends the process. Nothing here waits: a
pipe is read when it has something, and what the ended process left in it is taken at the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from branching.process.run_as import Owner

Sink = Callable[[bytes], None] | int | None
"""Where an output goes: a function that is handed the bytes, a descriptor, or None for ours."""

SCORE_BYTES_MAX = 4096
"""Of what is written to the score descriptor the end is kept."""

_READ_BYTES = 65536
_DRAIN_BYTES_MAX = 1 << 20
"""Above what a pipe holds: an escaped process that goes on writing does not keep us reading."""


class Pipes:
    """The pipes between us and one process: its outputs that a function reads, and its score."""

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
        self._score = b""
        self.score: int | None = None
        """The child's end of the score pipe."""
        try:
            for number, sink in sinks.items():
                if callable(sink):
                    # One function for both outputs gets one pipe: lines keep their order.
                    shared = number == 2 and sink == sinks[1]
                    self._child_ends[number] = self._child_ends[1] if shared else self._open(sink)
            if score:
                self.score = self._open(score if callable(score) else self._keep_score)
        except BaseException:
            self.__exit__()
            raise

    def child_end(self, number: int) -> int | None:
        sink = self._sinks[number]
        return self._child_ends[number] if callable(sink) else sink

    def readable(self) -> list[int]:
        return list(self._readers)

    def read(self, descriptor: int) -> bool:
        """Hands on what has arrived. False at the end of the stream."""
        try:
            arrived = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return True
        if arrived:
            self._readers[descriptor](arrived)
        return bool(arrived)

    def drain(self) -> None:
        """Hands on what the ended process left in its pipes."""
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
        return self._score.decode("utf-8", "replace").strip()

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
            # /dev/stdout and /proc/self/fd/N open the pipe anew, as the program's own user.
            os.fchown(childs, self._owner.uid, self._owner.gid)
        return childs

    def _keep_score(self, arrived: bytes) -> None:
        self._score = (self._score + arrived)[-SCORE_BYTES_MAX:]
