"""What is seen of the candidates while they run, on stderr.

On a terminal: a table with a row a candidate (`progress_table`). Elsewhere: each line of output
as it comes, after the candidate's number or name, `[2] text`. Quiet shows neither; verbose tells
each step, and so draws no table.
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


@contextmanager
def show_progress(
    labels: Sequence[str] | None = None,
    *,
    quiet: bool = False,
    verbose: bool = False,
    names: Sequence[str] = (),
) -> Iterator[OnEvent]:
    """Yields the listener that shows a pattern's events. `labels` tell what the candidates to come
    are, `names` stand for their numbers."""
    if quiet:
        yield taking_blocks(_print_nothing)
    elif verbose:
        yield taking_blocks(partial(_print_all, names))
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
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
