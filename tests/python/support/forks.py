"""`branching fork` in another process, waited for, and in this one, which is quicker."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from typer.testing import CliRunner

from branching import Workspace
from branching.cli.app import app
from support import waiting
from support.command import Done, Running

SECONDS_MAX = 100


until = partial(waiting.until, seconds_max=SECONDS_MAX)


def branch_with(root: Path, name: str, run: Running) -> Path:
    """Waits until a branch of a run has a file of that name; returns the branch's directory."""
    found: list[Path] = []

    def look() -> bool:
        with Workspace(root) as space:
            found.extend(each.path for each in space.branches() if (each.path / name).exists())
        if not found:
            run.assert_running()
        return bool(found)

    until(look, f"a branch has {name}")
    return found[0]


def called(root: Path, command: str, *words: str) -> Done:
    """Calls `branching COMMAND WORDS` on the workspace at `root`."""
    done = CliRunner().invoke(app, [command, "-w", str(root), *words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Done(done.exit_code, done.stdout, done.stderr)
