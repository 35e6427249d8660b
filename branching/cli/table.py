"""Tables: on a terminal with a header, coloured states and times such as `23 minutes ago`. There
a column without any value is left out, and a line is cut at the terminal's width.

Into a pipe or a file, each line is a row, and times have the form of ISO 8601, without spaces.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone

import typer

from branching._sanitize import line_for
from branching.cli.activity import is_utf8
from branching.cli.error_handling import note
from branching.cli.output import is_coloured

_UNITS = ((60, "second"), (60, "minute"), (24, "hour"), (30, "day"))
"""How many of each unit make one of the next."""
_GAP = "  "
_STATE = "STATE"
_STATE_COLOURS = {
    "won": "green",
    "succeeded": "green",
    "failed": "red",
    "error": "red",
    "timed out": "yellow",
    "stale": "yellow",
}


def time_ago(moment: float, now: float | None = None) -> str:
    """Returns how long ago a moment was: `just now`, `23 minutes ago`; after 30 days, the date.

    Args:
        moment: Unix time.
        now: Unix time. [default: the present]
    """
    count = int((time.time() if now is None else now) - moment)
    if count < 1:
        return "just now"
    for size, unit in _UNITS:
        if count < size:
            return f"{count} {unit}{'' if count == 1 else 's'} ago"
        count //= size
    return f"{local_time(moment):%Y-%m-%d}"


def local_time(moment: float) -> datetime:
    """Returns a Unix time in the time zone of this machine."""
    return datetime.fromtimestamp(moment, timezone.utc).astimezone()


def time_text(moment: float) -> str:
    """Returns a Unix time for standard output: how long ago it was, or for a pipe the time."""
    if sys.stdout.isatty():
        return time_ago(moment)
    return local_time(moment).isoformat(timespec="seconds")


def note_empty(text: str) -> None:
    """Says on a terminal why a table has no rows. A script sees that there are none."""
    if sys.stdout.isatty():
        note(text)


def table_lines(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()
) -> list[str]:
    """Returns the lines of a table for standard output; no header if that is no terminal.

    Args:
        headers: The names of the columns.
        rows: The cells. The last column is not padded.
        right: Columns that are aligned to the right, from 0.
    """
    table = [[line_for(sys.stdout, cell.replace("\n", " ")) for cell in row] for row in rows]
    if not table:
        return []
    is_terminal = sys.stdout.isatty()
    shown = [headers, *table] if is_terminal else table
    widths = [max(len(row[column]) for row in shown) for column in range(len(headers))]
    columns = [
        column
        for column in range(len(headers))
        if not is_terminal or any(row[column] for row in table)
    ]
    aligned = set(right)

    def line(row: Sequence[str]) -> str:
        cells = [
            row[column].rjust(widths[column])
            if column in aligned
            else row[column].ljust(widths[column])
            for column in columns
        ]
        return _GAP.join(cells).rstrip()

    if not is_terminal:
        return [*map(line, table)]
    width = shutil.get_terminal_size((0, 0)).columns  # 0 if it is unknown
    head, *lines = [_cut(line(row), width) for row in shown]
    if not is_coloured(sys.stdout):
        return [head, *lines]
    if _STATE in headers:
        before = columns[: columns.index(headers.index(_STATE))]
        start = sum(widths[column] + len(_GAP) for column in before)
        lines = [_with_coloured_state(text, start) for text in lines]
    return [typer.style(head, bold=True), *lines]


def _cut(text: str, width: int) -> str:
    if len(text) <= width or not width:
        return text
    return text[: width - 1] + ("…" if is_utf8(sys.stdout.encoding) else ">")


def _with_coloured_state(text: str, start: int) -> str:
    state = text[start:].partition(_GAP)[0]
    colour = _STATE_COLOURS.get(state)
    if colour is None:
        return text
    end = start + len(state)
    return f"{text[:start]}{typer.style(state, fg=colour)}{text[end:]}"
