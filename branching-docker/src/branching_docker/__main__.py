"""`branching-docker`, also as `python -m branching_docker`."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` wraps in enums
import os
import sys


def main() -> None:
    """Runs the command line and ends the process with its exit code."""
    # Until docker takes over there is nothing to tidy up: Ctrl-C ends us at once, and without a traceback.
    # What the caller has us ignore stays ignored.
    if _signal.getsignal(_signal.SIGINT) != _signal.SIG_IGN:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    while (opened := os.open("/dev/null", os.O_RDWR)) <= 2:  # a stream that we were not given must not become another
        os.set_inheritable(opened, True)
    os.close(opened)
    from branching_docker.fast_path import try_fast_path

    if (code := try_fast_path(sys.argv[1:], os.environ)) is not None:
        os._exit(code)  # all is said and written; to take the interpreter apart would cost milliseconds
    from branching_docker.cli import app

    if "_BRANCHING_DOCKER_COMPLETE" in os.environ:  # a shell wants to know what could come next
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()  # only an app with typer's own completion options does it by itself
    try:
        app(prog_name="branching-docker")
    except OSError as error:
        from branching_docker.errors import WrapperError

        told = WrapperError("the system refused an operation.", cause=str(error), hint="fix the cause, then try again")
        # Nothing is tidied up: what could not be written would only fail once more.
        os.write(2, "".join(f"{line}\n" for line in told.lines()).encode(errors="backslashreplace"))
        os._exit(told.exit_code)


if __name__ == "__main__":
    main()
