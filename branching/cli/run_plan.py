"""What `branching run` is to do, and how common command lines say so.

Common command lines are read here, without Typer, which takes longer than such a run:
`branching run [OPTIONS] [--] CMD...` with the options of `_FLAGS` and `_VALUES`, each a word of its
own. All else is for Typer: other options, `--option=value`, `-qv`, a wrong value, a settings file,
the help. A test compares the two on the same command lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from branching.cli.settings_file import has_settings
from branching.cli.workspace import start_directory

if TYPE_CHECKING:
    from branching.fs import Change, Workspace
    from branching.process import ResourceLimits


class End(str, Enum):
    """What becomes of the branch. `none` is an older word for `keep`."""

    commit = "commit"
    keep = "keep"
    abort = "abort"
    none = "none"


def _default_place(workspace: Workspace) -> dict[str, Any]:
    return {"directory": start_directory(workspace)}


class RunPlan(NamedTuple):
    """What to run, and how; the defaults are those of the command line."""

    command: list[str]
    workspace: Path | None = None
    branch: str | None = None
    """Name of the branch; None makes one up."""
    on_success: End = End.commit
    on_error: End = End.abort
    ask: bool = False
    timeout: float | None = None
    setup: str | None = None
    select: tuple[str, ...] = ()
    drop_rest: bool = False
    quiet: bool = False
    verbose: bool = False
    json: bool = False
    no_log: bool = False
    limits: ResourceLimits | None = None
    isolation: Mapping[str, Any] = MappingProxyType({})
    """Arguments of the `Program`."""
    place: Callable[[Workspace], dict[str, Any]] = _default_place
    """Returns those that depend on the open workspace."""

    @property
    def stdout(self) -> int:
        """The descriptor for the command's standard output: stderr where stdout has a document."""
        return 2 if self.json else 1


class Result(NamedTuple):
    """How the command ended, and what became of its branch."""

    exit_code: int
    how: str | None
    """As `process.Ended.how`; None if it never ran."""
    end: End
    changes: Sequence[Change] = ()
    """The committed changes."""
    commit_id: int | None = None
    """Id of the commit in the history; None if it cannot be undone."""
    remaining: int = 0
    """Number of changed paths that were not committed, and stay in the branch `rest`."""
    rest: str = ""


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
    if has_settings():
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
