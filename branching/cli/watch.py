"""`branching watch`: all branches of a workspace on one screen."""

from __future__ import annotations

import os
import sys

import typer

from branching.cli.error_handling import UsageFault, handle_errors
from branching.cli.options import WorkspaceOption
from branching.cli.workspace import opened_workspace


def watch(workspace: WorkspaceOption = None) -> None:
    """Show all branches and runs of a workspace in a terminal UI, and control them.

    Each branch has a row with its state, time, score, cost and changed paths. The chosen branch
    also shows its output, its files, and a comparison side by side. Keys pause, stop, keep and
    message running commands, and commit, abort and undo; `?` lists them. Quitting does not affect
    running branches. It needs the extra `tui`.

    Example: branching watch
    """
    with handle_errors(json=False):
        check_terminal("watch", "branching ls and branching log print the same")
        from branching.tui.watch.app import Watch

        with opened_workspace(workspace) as space:
            space.check_call(is_compared=True)
            app = Watch(space)
            app.run()
        raise typer.Exit(app.return_code or 0)


def check_terminal(command: str, instead: str) -> None:
    """Raises UsageFault where nothing can be drawn, or what draws is not installed."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
        raise UsageFault(f"{command} needs a terminal; {instead}")
    try:
        import textual  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageFault(
            f'{command} needs its extra: pip install ".[tui]" in the source tree ({error})'
        ) from error
    if not _has_colours():
        os.environ["NO_COLOR"] = "1"


def _has_colours() -> bool:
    """Whether the terminal has, as far as anything is known of it."""
    import curses

    try:
        curses.setupterm()
        return curses.tigetnum("colors") > 0
    except curses.error:
        return True
