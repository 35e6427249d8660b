"""What is seen of the candidates while they run, on stderr.

On a terminal: a table with a row a candidate (state, time, score, changed paths, last line of
output), drawn by rich; its last state stays on the screen. Elsewhere: each line of output as it
comes, after the candidate's number, `[2] text`. Quiet shows neither; verbose tells each step, and
so draws no table.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from branching.cli.visible import visible

if TYPE_CHECKING:
    from rich.table import Table

    from branching.patterns import Event
    from branching.patterns.event import OnEvent

REFRESHES_PER_SECOND = 8
"""Fast enough for a clock that counts tenths, slow enough to cost nothing."""
SETUP_ROW = "setup"

_STYLES = {
    "won": "bold green",
    "kept": "bold green",
    "succeeded": "green",
    "failed": "red",
    "error": "red",
    "timed_out": "yellow",
    "cancelled": "dim",
    "running": "cyan",
}


@contextmanager
def shown(
    labels: Sequence[str] | None = None, *, quiet: bool = False, verbose: bool = False
) -> Iterator[OnEvent]:
    """Yields the listener that shows a pattern's events. `labels` name the candidates to come."""
    if quiet:
        yield _print_nothing
    elif verbose:
        yield _print_all
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with _live(labels) as listener:
            yield listener
    else:
        yield _print_output


def _print_nothing(_: Event) -> None:
    pass


def _print_output(event: Event) -> None:
    if event.kind == "output":
        _print(event, event.text)
    elif event.kind == "finished" and event.state == "error":
        _print(event, f"branching: {event.text}")


def _print_all(event: Event) -> None:
    if event.kind == "output":
        _print(event, event.text)
    elif event.kind == "started":
        _print(event, f"branching: started in branch {event.branch}: {event.label}")
    elif event.kind == "finished":
        facts = [event.state.replace("_", " "), f"after {event.seconds:.1f} s"]
        facts += [f"({event.changes})"] if event.changes is not None else []
        facts += [f"({event.text})"] if event.text else []
        _print(event, f"branching: {' '.join(facts)}")
    elif event.kind == "scored":
        _print(event, f"branching: score {event.score:g}")
    else:
        _print(event, f"branching: {event.kind}" + (f": {event.text}" if event.text else ""))


def _print(event: Event, text: str) -> None:
    text = visible(text) if sys.stderr.isatty() else text
    print(f"[{_name(event.index)}] {text}", file=sys.stderr, flush=True)


def _name(index: int) -> str:
    return SETUP_ROW if index < 0 else str(index)


@contextmanager
def _live(labels: Sequence[str] | None) -> Iterator[OnEvent]:
    from rich.console import Console
    from rich.live import Live

    board = _Board(labels)
    live = Live(
        console=Console(stderr=True),
        get_renderable=board.table,
        refresh_per_second=REFRESHES_PER_SECOND,
    )
    with live:
        yield board.on_event


@dataclass
class _Row:
    label: str
    state: str = "waiting"
    line: str = ""
    score: float | None = None
    changes: str = ""
    started: float | None = None
    seconds: float = 0.0

    def clock(self) -> str:
        if self.started is None:
            return ""
        running = self.state == "running"
        return f"{time.monotonic() - self.started if running else self.seconds:.1f}s"


class _Board:
    """The rows, written by the pattern's threads and drawn by rich's."""

    def __init__(self, labels: Sequence[str] | None) -> None:
        self._lock = threading.Lock()
        self._rows = {index: _Row(label) for index, label in enumerate(labels or ())}

    def on_event(self, event: Event) -> None:
        with self._lock:
            row = self._rows.setdefault(event.index, _Row(event.label))
            if event.kind == "started":
                row.state, row.started = "running", time.monotonic()
            elif event.kind in ("output", "critiqued", "judged"):
                row.line = event.text.rstrip().rpartition("\n")[2] or row.line
            elif event.kind == "finished":
                row.state, row.seconds = event.state, event.seconds
                row.line = event.text if event.state == "error" else row.line
            elif event.kind == "scored":
                row.score = event.score
            elif event.kind in ("committed", "kept"):
                row.state = "won" if event.kind == "committed" else "kept"
            if event.changes is not None:
                row.changes = event.changes.short

    def table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, 1), expand=True)
        table.add_column("#", justify="right", no_wrap=True)
        table.add_column("candidate", ratio=2, no_wrap=True, overflow="ellipsis")
        table.add_column("state", no_wrap=True)
        table.add_column("time", justify="right", no_wrap=True)
        with self._lock:
            rows = sorted(self._rows.items())
            with_scores = any(row.score is not None for _, row in rows)
            if with_scores:
                table.add_column("score", justify="right", no_wrap=True)
            table.add_column("changes", no_wrap=True)
            table.add_column("last output", ratio=3, no_wrap=True, overflow="ellipsis")
            for index, row in rows:
                score = "" if row.score is None else f"{row.score:.2f}"
                table.add_row(
                    _name(index),
                    Text(row.label),
                    Text(row.state.replace("_", " "), style=_STYLES.get(row.state, "")),
                    row.clock(),
                    *([score] if with_scores else []),
                    row.changes,
                    # What a candidate prints may colour itself; here it must not colour the rest.
                    Text.from_ansi(row.line),
                )
        return table
