"""Tables: on a terminal with a header and times such as `23 minutes ago`.

Into a pipe or a file, each line is a row, and times have the form of ISO 8601, without spaces.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone

import typer

from branching._sanitize import line_for
from branching.cli.error_handling import note
from branching.cli.output import is_coloured

_UNITS = ((60, "second"), (60, "minute"), (24, "hour"), (30, "day"))
"""How many of each unit make one of the next."""
_GAP = "  "


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
    shown = [headers, *table] if sys.stdout.isatty() else table
    widths = [max(len(row[column]) for row in shown) for column in range(len(headers))]
    aligned = set(right)

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if column in aligned else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return _GAP.join(cells).rstrip()

    if not sys.stdout.isatty():
        return [*map(line, table)]
    header = line(headers)
    if is_coloured(sys.stdout):
        header = typer.style(header, bold=True)
    return [header, *map(line, table)]
