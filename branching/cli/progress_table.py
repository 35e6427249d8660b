"""The table of candidates on a terminal: a row each, with state, time, score, changes, last line.

It is written by the pattern's threads and drawn by rich's, several times a second. Where it has
more rows than the terminal, those are drawn that say most at the moment: the winner's, those that
run, those that ended last; a line below counts the others. The last line moves while candidates
run, and has the time since the start and how many candidates are in each state. When all is over
the table is drawn whole, without that line, and stays on the screen.

What candidates print, and what they are called, is shown and never obeyed (`_sanitize`).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from branching._sanitize import visible
from branching.cli.activity import spinner_frames

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

    from branching.patterns import Event

REFRESHES_PER_SECOND = 8
"""Fast enough for a clock that counts tenths, slow enough to cost nothing."""
LINE_CHARACTERS_MAX = 400
"""Maximum length of a line of output, and of a label, in a row."""
ROOMY_COLUMNS = 60
"""On a narrower terminal the row has no changes, to leave room for the last line of output."""
SETUP_ROW = "setup"
_STATE_COLUMNS = len("succeeded")
"""Most states fit: columns do not move when a candidate ends."""
_COMMON_CHARACTERS_MIN = 12
"""What two candidates have in common at their beginning is left out if it is as long as this."""

_STYLES = {
    "won": "bold green",
    "kept": "bold green",
    "succeeded": "green",
    "done": "green",
    "failed": "red",
    "error": "red",
    "timed_out": "yellow",
    "budget_exhausted": "yellow",
    "aggregate_budget_exhausted": "yellow",
    "cancelled": "dim",
    "running": "cyan",
}
_FOREMOST = ("won", "kept", "running")


def row_name(names: Sequence[str], index: int) -> str:
    """Returns what a candidate's row begins with: its name if they have names, else its number."""
    if index < 0:
        return SETUP_ROW
    return names[index] if names else str(index)


@dataclass
class _Row:
    label: str
    state: str = "waiting"
    line: str = ""
    score: float | None = None
    changes: str = ""
    node: str = ""
    started: float | None = None
    seconds: float = 0.0
    last_step: int = 0
    """Counts up with each state that any row takes on."""

    def clock(self) -> str:
        if self.started is None:
            return ""
        running = self.state == "running"
        return f"{time.monotonic() - self.started if running else self.seconds:.1f}s"


class ProgressTable:
    """The rows. `labels` describe candidates in advance; `names` replace their numbers."""

    def __init__(self, labels: Sequence[str] | None = None, names: Sequence[str] = ()) -> None:
        self._names = names
        self._lock = threading.Lock()
        self._rows = {index: _Row(_one_line(label)) for index, label in enumerate(labels or ())}
        self._steps = 0
        self._begun = time.monotonic()
        self.is_over = False
        """Nothing more will happen: all rows are drawn."""

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Draws it on stderr for the length of the `with`, and leaves its last state there."""
        from rich.console import Console
        from rich.live import Live

        console = Console(stderr=True)
        live = Live(
            console=console,
            get_renderable=lambda: self.drawing(console),
            refresh_per_second=REFRESHES_PER_SECOND,
        )
        with live:
            try:
                yield
            finally:
                self.is_over = True

    def on_event(self, event: Event) -> None:
        """Updates the rows by an event of the pattern."""
        with self._lock:
            row = self._rows.setdefault(event.index, _Row(_one_line(event.label)))
            if event.kind in ("started", "resumed"):
                self._put(row, "running")
                row.started = time.monotonic()
            elif event.kind in ("output", "critiqued", "judged"):
                row.line = _last_line(event.text) or row.line
            elif event.kind == "finished":
                self._put(row, event.state)
                row.seconds = event.seconds
                if event.state == "error" or not row.line:  # the reason, such as "exit 3"
                    row.line = _last_line(event.text)
            elif event.kind == "scored":
                row.score = event.score
            elif event.kind in ("committed", "kept"):
                self._put(row, "won" if event.kind == "committed" else "kept")
            elif event.kind == "spent" and event.state:
                self._put(row, event.state)
            row.node = event.node or row.node
            if event.changes is not None:
                row.changes = event.changes.short

    def _put(self, row: _Row, state: str) -> None:
        self._steps += 1
        row.state, row.last_step = state, self._steps

    def drawing(self, console: Console) -> Group:
        """Returns the table, and while it can change the line that moves and an empty one for the
        cursor: where the terminal shows ^C itself, which would break a line in two."""
        from rich.console import Group

        if self.is_over:
            return Group(self.table(console))
        return Group(self.table(console), self._status(console), "")

    def _status(self, console: Console) -> Text:
        """Returns the line that moves: `⠹ 12.3s · 1 running, 1 failed`."""
        from rich.text import Text

        seconds = time.monotonic() - self._begun
        frames = spinner_frames(console.encoding)
        frame = frames[int(seconds * REFRESHES_PER_SECOND) % len(frames)]
        with self._lock:
            states = Counter(row.state for row in self._rows.values())
        line = f"{frame} {seconds:.1f}s" + (f" · {_counts(states)}" if states else "")
        return Text(line, style="dim", no_wrap=True, overflow="ellipsis")

    def table(self, console: Console) -> Table:
        """Returns it as it is now, as large as the terminal has room for."""
        from rich.table import Table
        from rich.text import Text

        is_roomy = console.width >= ROOMY_COLUMNS
        table = Table(box=None, padding=(0, 1), expand=True)
        table.add_column("#", justify="right", no_wrap=True)
        table.add_column("candidate", ratio=2, no_wrap=True, overflow="ellipsis")
        table.add_column("state", no_wrap=True, min_width=_STATE_COLUMNS if is_roomy else None)
        table.add_column("time", justify="right", no_wrap=True)
        with self._lock:
            with_scores = any(row.score is not None for row in self._rows.values())
            if with_scores:
                table.add_column("score", justify="right", no_wrap=True)
            with_nodes = is_roomy and any(row.node for row in self._rows.values())
            if with_nodes:
                table.add_column("node", no_wrap=True)
            if is_roomy:
                table.add_column("changes", no_wrap=True)
            table.add_column("last output", ratio=3, no_wrap=True, overflow="ellipsis")
            shown, others = self._fitting(console.height - 3)  # the head, and the two last lines
            labels = _differing({index: row.label for index, row in self._rows.items()})
            for index in shown:
                row = self._rows[index]
                score = "" if row.score is None else f"{row.score:.2f}"
                table.add_row(
                    Text(row_name(self._names, index)),
                    Text(labels[index]),
                    Text(row.state.replace("_", " "), style=_STYLES.get(row.state, "")),
                    row.clock(),
                    *([score] if with_scores else []),
                    *([Text.from_ansi(visible(row.node))] if with_nodes else []),
                    *([row.changes] if is_roomy else []),
                    # What a candidate prints may colour itself; here it must not colour the rest.
                    Text.from_ansi(visible(row.line)),
                )
        if others:
            table.caption = f"and {_counts(others)}"
            table.caption_justify = "left"
        return table

    def _fitting(self, lines: int) -> tuple[list[int], Counter[str]]:
        """Returns which rows to draw, in their order, and how many of each state are left out."""
        indices = sorted(self._rows)
        if self.is_over or len(indices) <= lines:
            return indices, Counter()

        def weight(index: int) -> tuple[bool, int]:
            row = self._rows[index]
            return row.state in _FOREMOST, row.last_step

        shown = sorted(indices, key=weight, reverse=True)[: max(lines - 1, 1)]
        left_out = (self._rows[index].state for index in indices if index not in shown)
        return sorted(shown), Counter(left_out)


def _counts(states: Counter[str]) -> str:
    return ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in states.items())


def _differing(labels: dict[int, str]) -> dict[int, str]:
    """Returns the labels without the words that they have in common after the first: of
    `sed -i s/a/b/ f` and `sed -i s/a/c/ f` the columns of a terminal would show only the same."""
    order = sorted(set(labels.values()))
    shown = {}
    for place, label in enumerate(order):
        others = order[max(place - 1, 0) : place] + order[place + 1 : place + 2]
        common = max((_common_length(label, other) for other in others), default=0)
        first, rest = label.find(" ") + 1, label.rfind(" ", 0, common) + 1
        is_long = first and rest - first >= _COMMON_CHARACTERS_MIN
        shown[label] = f"{label[:first]}…{label[rest:]}" if is_long else label
    return {index: shown[label] for index, label in labels.items()}


def _common_length(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def _one_line(label: str) -> str:
    return visible(" ".join(label[:LINE_CHARACTERS_MAX].split()))


def _last_line(text: str) -> str:
    """Returns what would stand in the last line of a terminal: a bar draws over itself by \\r."""
    line = text.rstrip().rpartition("\n")[2].rpartition("\r")[2]
    return line[:LINE_CHARACTERS_MAX]
