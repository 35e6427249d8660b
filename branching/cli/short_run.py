"""Reads common command lines of `branching run` without Typer, which takes longer than such a run.

`branching run [OPTIONS] [--] CMD...` with the options of `_FLAGS` and `_VALUES`, each a word of its
own. All else is for Typer: other options, `--option=value`, `-qv`, a wrong value, a settings file,
the help. A test compares the two on the same command lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from branching.cli.error_handling import UsageFault
from branching.cli.run_command import End, RunPlan
from branching.cli.settings_file import read_settings

_FLAGS = {
    "-q": "quiet",
    "--quiet": "quiet",
    "-v": "verbose",
    "--verbose": "verbose",
    "--ask": "ask",
    "--drop-rest": "drop_rest",
    "--json": "json",
    "--no-log": "no_log",
}
_VALUES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "--on-success": ("on_success", End),
    "--on-error": ("on_error", End),
    "-w": ("workspace", Path),
    "--workspace": ("workspace", Path),
    "-b": ("branch", str),
    "--branch": ("branch", str),
}


def read_short_run(words: Sequence[str]) -> RunPlan | None:
    """Returns what the command line asks for, or None if Typer must read it.

    Args:
        words: The command line after `run`.
    """
    if _has_settings():
        return None
    values: dict[str, Any] = {}
    rest = iter(words)
    command: list[str] = []
    for word in rest:
        if word in _FLAGS:
            values[_FLAGS[word]] = True
        elif word in _VALUES:
            name, convert = _VALUES[word]
            value = next(rest, "")
            if not value or value.startswith("-"):
                return None
            try:
                values[name] = convert(value)
            except ValueError:
                return None
        elif word == "--":
            command = list(rest)
        elif word.startswith("-"):
            return None
        else:
            command = [word, *rest]
    if not command or not command[0]:
        return None
    return RunPlan(command=command, **values)


def _has_settings() -> bool:
    try:
        return read_settings()[1] != ""
    except UsageFault:
        return True  # Typer's way reports it
