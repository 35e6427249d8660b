"""Shows the running candidates on standard error.

On a terminal: a table with a row for each candidate (`progress_table`). Otherwise: each line of
output with the candidate's number or name, `[2] text`. With --quiet neither; with --verbose each
step instead of the table.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from branching._sanitize import visible
from branching.cli.progress_table import ProgressTable, row_name
from branching.runlog.events import taking_blocks

if TYPE_CHECKING:
    from branching.patterns import Event
    from branching.runlog.events import OnEvent


def shows_table(*, quiet: bool, verbose: bool) -> bool:
    """Returns whether the candidates are shown as a table."""
    is_plain = quiet or verbose or os.environ.get("TERM") == "dumb"
    return sys.stderr.isatty() and not is_plain


@contextmanager
def show_progress(
    labels: Sequence[str] | None = None,
    *,
    quiet: bool = False,
    verbose: bool = False,
    names: Sequence[str] = (),
) -> Iterator[OnEvent]:
    """Yields the listener that shows a pattern's events.

    `labels` describe candidates in advance; `names` replace their numbers.
    """
    if quiet:
        yield taking_blocks(_print_nothing)
    elif verbose:
        yield taking_blocks(partial(_print_all, names))
    elif shows_table(quiet=quiet, verbose=verbose):
        table = ProgressTable(labels, names)
        with table.drawn():
            yield taking_blocks(partial(table.on_event))
    else:
        yield taking_blocks(partial(_print_output, names))


def _print_nothing(_: Event) -> None:
    pass


def _print_output(names: Sequence[str], event: Event) -> None:
    if event.kind == "output":
        _print(names, event, event.text)
    elif event.kind == "finished" and event.state == "error":
        _print(names, event, f"branching: {event.text}")


def _print_all(names: Sequence[str], event: Event) -> None:
    if event.kind == "output":
        _print(names, event, event.text)
    elif event.kind == "started":
        _print(names, event, f"branching: started in branch {event.branch}: {event.label}")
    elif event.kind == "finished":
        facts = [event.state.replace("_", " "), f"after {event.seconds:.1f} s"]
        facts += [f"({event.changes})"] if event.changes is not None else []
        facts += [f"({event.text})"] if event.text else []
        _print(names, event, f"branching: {' '.join(facts)}")
    elif event.kind == "placed":
        _print(names, event, f"branching: runs on node {event.node}")
    elif event.kind == "scored":
        _print(names, event, f"branching: score {event.score:g}")
    else:
        text = f"branching: {event.kind}" + (f": {event.text}" if event.text else "")
        _print(names, event, text)


def _print(names: Sequence[str], event: Event, text: str) -> None:
    head = f"[{row_name(names, event.index)}] "
    if sys.stderr.isatty():
        said = "\n".join(visible(head + line) for line in text.split("\n"))
    else:
        said = head + text.replace("\n", f"\n{head}")
    print(said, file=sys.stderr, flush=True)
