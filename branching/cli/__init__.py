"""The `branching` command. It needs the extra `cli` (typer, rich); the library does not."""

from __future__ import annotations

import signal
import sys

EXIT_OURS = 125
"""Our own failure, as Docker and coreutils have it; every other code has a meaning of its own."""


def main() -> None:
    """Runs the command line and exits."""
    # Until a command listens itself, a signal ends us as it ends any program: without a traceback.
    # What the caller has us ignore stays ignored.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from branching.cli.app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("typer", "rich"):
            raise
        print(
            f"error: the branching command needs {error.name}, which is not installed\n"
            'Hint: pip install "BranchContext[cli]"',
            file=sys.stderr,
        )
        sys.exit(EXIT_OURS)
    app(prog_name="branching")
