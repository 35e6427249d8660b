"""A Python function in the sandbox: called, and its result sent home. Runs in child."""

from __future__ import annotations

import gc
import os
import sys
import time
from typing import NoReturn

from branching.process.sandbox.launch_request import Request

EXIT_RAISED = 1


def run(request: Request) -> NoReturn:
    """Calls the function and exits: 0 it returned, 1 it raised, or what SystemExit says."""
    code = EXIT_RAISED
    try:
        code = _call(request)
    except BaseException:
        # The result itself could not be written (no memory): the exit code must do.
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _call(request: Request) -> int:
    gc.enable()
    if request.result >= 0:
        os.set_inheritable(request.result, False)  # not for programs that the function starts
    sys.path[:] = request.path
    os.environ.clear()
    os.environ.update(request.environment)
    time.tzset()  # the C library has read TZ before
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())
    from branching.process.functions import function_pickle, result_channel

    try:
        function, arguments = function_pickle.unpack(request.call)
        result_channel.write_value(request.result, function(*arguments))
        return 0
    except SystemExit as asked:
        if asked.code is None or isinstance(asked.code, int):
            return (asked.code or 0) & 0xFF
        print(asked.code, file=sys.stderr)
        return EXIT_RAISED
    except BaseException as error:
        result_channel.write_exception(request.result, error)
        return EXIT_RAISED
