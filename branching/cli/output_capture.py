"""A copy of what `branching run` prints, kept for `branching log`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from branching.cli.hints import RefusedWrites
from branching.patterns.command_candidate import BlockSplitter
from branching.process.output_tee import OutputTee
from branching.runlog.events import Event
from branching.runlog.run_log import RunLog

if TYPE_CHECKING:
    from branching.fs import Workspace
    from branching.process import Owner


class OutputCapture:
    """Logs the output that passes through the tee, as output of the last started command."""

    def __init__(self, book: RunLog, owner: Owner | None, stdout: int) -> None:
        self._write = book.and_then(self._notice)
        self._lock = threading.Lock()  # guards the run log: each output has its own thread
        self._started: Event | None = None
        self.refused = RefusedWrites()
        self.tee = OutputTee(self._new_lines, owner=owner, stdout=stdout)

    def on_event(self, event: Event) -> None:
        """Logs an event of the runner."""
        with self._lock:
            self._write(event)

    def _notice(self, event: Event) -> None:
        if event.kind == "started":
            self._started = event

    def _new_lines(self) -> Callable[[bytes], None]:
        lines = BlockSplitter(self._keep)

        def keep(arrived: bytes) -> None:
            if arrived:
                lines.feed(arrived)
            else:
                lines.finish()

        return keep

    def _keep(self, block: str) -> None:
        with self._lock:
            self.refused.read(block)
            if self._started is not None:
                self._write(
                    Event(
                        kind="output",
                        index=self._started.index,
                        branch=self._started.branch,
                        text=block,
                    )
                )


@contextmanager
def capture_output(
    workspace: Workspace, owner: Owner | None, stdout: int
) -> Iterator[OutputCapture | None]:
    """Logs the output for the length of the `with`.

    Yields None if nothing can be logged. Inside a branch the output is logged as that of the
    candidate.
    """
    with RunLog.of(workspace, "run") as book:
        if not book.is_open:
            yield None
            return
        copy = OutputCapture(book, owner, stdout)
        before = signal.signal(signal.SIGWINCH, lambda *_: copy.tee.resize())
        try:
            with copy.tee:
                yield copy
        finally:
            signal.signal(signal.SIGWINCH, before)
