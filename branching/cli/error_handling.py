"""Failures of commands: one message on standard error, and an exit code for the cause.

2        wrong usage
125      the command failed: no workspace, a dead mount, a refused commit
128+n    stopped by signal n; 141 if the reader of the output has gone
"""

from __future__ import annotations

import json as json_format
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from branching._caller import for_caller, host_directory
from branching._exit_codes import EXIT_OURS, EXIT_SIGNAL_BASE, EXIT_USAGE
from branching._sanitize import line_for
from branching.errors import BranchingError

JSON_VERSION = 1
"""Of every document that is printed. A field may be added without a new number."""


class UsageFault(Exception):
    """The command line asks for something that makes no sense. Nothing was done."""


def refuse_in_container(reason: str) -> None:
    """Raises UsageFault in a container of branching-docker, with why and what to do instead."""
    if host_directory() is not None:
        raise UsageFault(reason)


class Interrupted(Exception):
    """The command was stopped by a signal."""

    def __init__(self, signum: int, hint: str | None = None) -> None:
        super().__init__(f"stopped by signal {signum}; nothing was committed")
        self.signum = signum
        self.hint = hint


_is_json = False


def note(text: str) -> None:
    """Prints a line on standard error. With --json that has a JSON document or nothing."""
    if not _is_json:
        print(line_for(sys.stderr, for_caller(text)), file=sys.stderr, flush=True)


@contextmanager
def handle_errors(*, json: bool) -> Iterator[None]:
    """Turns the failures that a user can meet into a text and an exit code."""
    global _is_json  # noqa: PLW0603  (one command a process)
    _is_json = json
    try:
        yield
    except UsageFault as fault:
        _fail(EXIT_USAGE, str(fault), None, json=json)
    except Interrupted as interrupted:
        code = EXIT_SIGNAL_BASE + interrupted.signum
        _fail(code, str(interrupted), interrupted.hint, json=json)
    except BranchingError as error:
        text = error.message
        if error.paths:
            text += "".join(f"\n  {path}" for path in error.paths)
        _fail(EXIT_OURS, text, error.hint, json=json)
    except BrokenPipeError:
        # Who reads our output went away; there is nobody to tell. The rest of it is dropped here,
        # or the interpreter would try to write it again at exit.
        sys.stdout = None
        raise SystemExit(EXIT_SIGNAL_BASE + signal.SIGPIPE) from None
    except OSError as error:
        _fail(EXIT_OURS, _system_message(error), None, json=json)
    except ValueError as error:
        _fail(EXIT_OURS, str(error), None, json=json)


def _system_message(error: OSError) -> str:
    """Returns what the system said, without its number, and of which file."""
    if error.strerror is None:
        return str(error)
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"


def _fail(code: int, text: str, hint: str | None, *, json: bool) -> None:
    text, hint = for_caller(text), for_caller(hint or "")
    if json:
        document = {"version": JSON_VERSION, "error": text, **({"hint": hint} if hint else {})}
        lines = [json_format.dumps(document)]
    else:
        lines = [f"error: {text}", *([f"Hint: {hint}"] if hint else [])]
        lines = [line_for(sys.stderr, line) for line in "\n".join(lines).split("\n")]
    try:
        print("\n".join(lines), file=sys.stderr, flush=True)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        # The terminal was closed, or nobody reads. The exit code is the interpreter's own if it
        # fails to write again at exit.
        sys.stdout = sys.stderr = None
    raise SystemExit(code)
