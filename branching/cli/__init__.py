"""The `branching` command. It needs the extra `cli` (typer, rich); the library does not."""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
import threading

from branching._exit_codes import EXIT_OURS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> None:
    """Runs the command line and exits."""
    gc.set_threshold(50_000)  # modules are no garbage, and looking through them takes time
    _open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name may be of any bytes, and a terminal know few characters: neither is a failure.
        is_utf8 = sys.stdout.encoding.lower() == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")
    _run_short(sys.argv[1:])
    try:
        from branching.cli.app import app_for
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("typer", "rich"):
            raise
        print(
            f"error: the branching command needs {error.name}, which is not installed\n"
            'Hint: pip install ".[cli]" in the source tree',
            file=sys.stderr,
        )
        sys.exit(EXIT_OURS)
    from branching.cli.completion import COMPLETE_VARIABLE

    if COMPLETE_VARIABLE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()  # only an app with typer's own completion options does it by itself
        from branching.cli.app import app  # the shell's words are in the environment
    else:
        app = app_for(sys.argv[1:])
    from branching._caller import command_name

    try:
        app(prog_name=command_name())
    except SystemExit as end:
        if isinstance(end.code, int) and threading.active_count() == 1:
            _exit(end.code)
        raise


def _run_short(words: list[str]) -> None:
    """Does a common `branching run`, and exits; returns if Typer has to read the command line."""
    if words[:1] != ["run"]:
        return
    from branching.cli.error_handling import handle_errors
    from branching.cli.run_command import run_command
    from branching.cli.run_plan import read_short_run

    plan = read_short_run(words[1:])
    if plan is None:
        return
    with handle_errors(json=plan.json):
        _exit(run_command(plan))


def _exit(code: int) -> NoReturn:
    """Exits without freeing all memory first, which takes as long as to start the interpreter."""
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # as after a reader that went away
                stream.flush()
    except OSError:
        sys.exit(code)  # the interpreter's exit code is its own if it fails to write again
    os._exit(code)


def _open_standard_streams() -> None:
    """Opens those that we were started without (`<&-`): the next file would get their number, and
    who reads its input would wait for what is none.
    """
    from branching._standard_streams import open_closed

    open_closed()
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
