"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)?", re.ASCII)
_SECONDS = {None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str) -> float:
    """Reads 90, 90s, 5m, 1.5h as seconds. Zero is refused: it would stop before it starts."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a duration; write 90, 90s, 5m or 1.5h")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds <= 0:
        raise typer.BadParameter("a duration must be more than zero")
    return seconds


WorkspaceOption = Annotated[
    Path | None,
    typer.Option(
        "-w",
        "--workspace",
        metavar="PATH",
        help="Any path in the workspace. [default: the current directory]",
        show_default=False,
    ),
]

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else.")
]

TimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="DURATION",
        parser=parse_duration,
        help="Give up after this long in all: 90, 90s, 5m.",
        show_default=False,
    ),
]

CommandArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- CMD...", help="The command and its arguments.", show_default=False),
]

BranchArgument = Annotated[
    str, typer.Argument(metavar="BRANCH", help="Name of an open branch.", show_default=False)
]
