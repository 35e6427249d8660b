"""Shows long output on a terminal in a pager, and a patch in colours.

Into a pipe or a file the output is written as it is.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Annotated

import typer

from branching._sanitize import visible
from branching.cli.output import is_coloured

NoPagerOption = Annotated[
    bool,
    typer.Option(
        "--no-pager",
        help="Print to the terminal directly, without a pager. [default: $PAGER, or less -FRX]",
    ),
]

PAGER_DEFAULT = "less"
LESS_OPTIONS_DEFAULT = "FRX"
"""For `less`, unless the variable LESS is set: end if the text fits on the screen, pass colours on,
leave the text on the screen."""

_LINE_COLOURS = {"+": "green", "-": "red"}
_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")


def show_lines(lines: Iterable[bytes], *, pager: bool = True) -> None:
    """Writes lines to standard output, on a terminal through a pager.

    Args:
        lines: The lines, with their ends.
        pager: Whether to use a pager.
    """
    command = _pager() if pager and sys.stdout.isatty() else None
    sys.stdout.flush()
    if command is None:
        sys.stdout.buffer.writelines(lines)
        sys.stdout.buffer.flush()
        return
    environment = {"LESS": LESS_OPTIONS_DEFAULT, "LV": "-c", **os.environ}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    assert process.stdin is not None, "it is a pipe"
    # Ctrl-C is a command of the pager; it reaches this process as well.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with suppress(BrokenPipeError):  # the user has seen enough
            process.stdin.writelines(lines)
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()
    finally:
        signal.signal(signal.SIGINT, handler)


def show_text(lines: Iterable[str], *, pager: bool = True) -> None:
    """Writes lines without their ends, as `show_lines` does."""
    show_lines(encoded(lines), pager=pager)


def encoded(lines: Iterable[str]) -> list[bytes]:
    """Returns lines, without their ends, as `show_lines` takes them."""
    encoding, errors = sys.stdout.encoding, sys.stdout.errors or "strict"
    return [f"{line}\n".encode(encoding, errors) for line in lines]


def _pager() -> list[str] | None:
    """Returns the pager's words; None if there is none, or it would only copy its input."""
    if os.environ.get("TERM") == "dumb":
        return None
    for text in (os.environ.get("PAGER", PAGER_DEFAULT), PAGER_DEFAULT):
        try:
            words = shlex.split(text)
        except ValueError:
            continue
        if not words or words == ["cat"]:
            return None
        if shutil.which(words[0]) is not None:
            return words
    return None


def patch_lines(patch: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the lines of a patch as standard output gets them: unchanged, unless it is a terminal.

    For a terminal, control characters are replaced by a visible form, and the lines are coloured as
    git colours them.
    """
    if not sys.stdout.isatty():
        yield from patch
        return
    colours = is_coloured(sys.stdout)
    old = new = 0  # lines that are left of the hunk
    for line in patch:
        text = visible(line.rstrip(b"\n").decode("utf-8", "replace"))
        style: dict[str, object] = {}
        if (old or new) and text[:1] in ("+", "-", " ", ""):
            old -= text[:1] != "+"
            new -= text[:1] != "-"
            if text[:1] in _LINE_COLOURS:
                style = {"fg": _LINE_COLOURS[text[:1]]}
        elif hunk := _HUNK.match(text):
            old, new = (1 if count is None else int(count) for count in hunk.groups())
            style = {"fg": "cyan"}
        elif not text.startswith(("\\", "#")):
            old = new = 0
            style = {"bold": True}
        yield (typer.style(text, **style) if colours and style else text).encode() + b"\n"  # type: ignore[arg-type]
