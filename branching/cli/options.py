"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import math
import re
from enum import Enum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from branching.cli.error_handling import UsageFault

STANDARD_STREAM = Path("-")
"""A file's name that means standard input or output."""

R = TypeVar("R", str | None, list[str] | None)

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)?", re.ASCII)
_WIDTH = re.compile(r"0*[1-9]\d{0,5}", re.ASCII)
_SECONDS = {None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str) -> float:
    """Reads 90, 90s, 5m, 1.5h as seconds. Zero is refused: it would stop before it starts."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a duration; write 90, 90s, 5m or 1.5h")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds == math.inf:
        raise typer.BadParameter("a duration must be finite")
    if seconds <= 0:
        raise typer.BadParameter("a duration must be more than zero")
    return seconds


def parse_widths(text: str) -> tuple[int, ...]:
    """Reads 1,2,4 as the widths of waves."""
    words = text.split(",")
    if not all(_WIDTH.fullmatch(word.strip()) for word in words):
        raise UsageFault(f"{text[:80]!r} is not a list of widths; write 1,2,4")
    return tuple(map(int, words))


def not_blank(value: R) -> R:
    """Refuses a text without a letter: a variable of the caller's was empty, and `sh` would take it
    for a success."""
    for text in [value] if isinstance(value, str) else value or ():
        if not str(text).strip():
            raise typer.BadParameter("it is empty")
    return value


def _program_named(command: list[str] | None) -> list[str] | None:
    if command and not command[0]:
        raise typer.BadParameter("its first word, the program, is empty")
    return command


class Driver(str, Enum):
    """The drivers of the file system, and the choice of one by itself."""

    auto = "auto"
    fuse = "fuse"
    overlay = "overlay"


class Policy(str, Enum):
    """The file system's policies."""

    first_winner = "first-winner"
    snapshot = "snapshot"
    serializable = "serializable"


WorkspaceOption = Annotated[
    Path | None,
    typer.Option(
        "-w",
        "--workspace",
        metavar="PATH",
        parser=Path,  # typer's own looks at the path, and hangs where a mount does not answer
        help="The directory to work on, or a path in a mount. [default: the current directory, or "
        "the nearest one above it that keeps branches]",
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
        help="Overall time limit: 90, 90s, 5m.",
        show_default=False,
    ),
]

ParallelOption = Annotated[
    int | None,
    typer.Option(
        "--parallel",
        metavar="N",
        min=1,
        help="Run at most N concurrently. [default: all]",
        show_default=False,
    ),
]

SetupOption = Annotated[
    str | None,
    typer.Option(
        "--setup",
        metavar="CMD",
        callback=not_blank,
        help="Shell command that runs once, before the branches are forked; all start from its "
        "result. Its changes are committed only with the winner.",
        show_default=False,
    ),
]

SelectOption = Annotated[
    list[str] | None,
    typer.Option(
        "--select",
        metavar="GLOB",
        callback=not_blank,
        help="Commit these paths only; the branch stays open with the rest. Repeatable.",
        show_default=False,
    ),
]

MergeSelectOption = Annotated[
    list[str] | None,
    typer.Option(
        "--select",
        metavar="GLOB",
        callback=not_blank,
        help="Merge these paths of the winner only; branching log --patch has the others. "
        "Repeatable.",
        show_default=False,
    ),
]

DropRestOption = Annotated[
    bool,
    typer.Option(
        "--drop-rest",
        help="Drop the changed paths that are not committed, and close the branch.",
    ),
]

QuietOption = Annotated[
    bool,
    typer.Option(
        "-q", "--quiet", help="Hide the output of the candidates; `branching log` shows it."
    ),
]

VerboseOption = Annotated[
    bool, typer.Option("-v", "--verbose", help="Print each step and each changed path.")
]

CandidatesOption = Annotated[
    list[str] | None,
    typer.Option(
        "-c",
        "--candidate",
        metavar="CMD",
        callback=not_blank,
        help="Shell command of a candidate, which runs in its own branch. Repeatable.",
        show_default=False,
    ),
]

EvaluateOption = Annotated[
    str | None,
    typer.Option(
        "--evaluate",
        "--judge",
        metavar="CMD",
        callback=not_blank,
        help="Shell command that scores each success in its branch. The score is the number that "
        "it writes to file descriptor 3, or prints last.",
        show_default=False,
    ),
]

ExpandOption = Annotated[
    str | None,
    typer.Option(
        metavar="CMD",
        callback=not_blank,
        help="Shell command that runs in each branch that survived a level and prints the "
        "candidates to try next from there, one per line. BRANCHING_DEPTH is the level, "
        "from 1.",
        show_default=False,
    ),
]

DepthOption = Annotated[
    int, typer.Option("--max-depth", min=1, help="Number of levels, including the first.")
]

CommandArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- CMD...",
        callback=_program_named,
        help="The command and its arguments.",
        show_default=False,
    ),
]

BranchArgument = Annotated[
    str, typer.Argument(metavar="BRANCH", help="Name of an open branch.", show_default=False)
]
