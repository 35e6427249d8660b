"""A program that is executed at once, without a copy of init in between.

A fork of init copies its page tables and then each page that Python touches, only to replace it
all: posix_spawn(3) shares the memory until the program is executed, which saves a quarter of what
starting one takes. But nothing of ours can run in between: who is to wait at the gate, or to take
a terminal, is forked (`pre_exec`).
"""

from __future__ import annotations

import os
import signal

from branching.process.sandbox import pre_exec
from branching.process.sandbox.launch_request import Request


def can_be(request: Request) -> bool:
    """Whether all that is asked for can be had this way."""
    return (
        bool(request.argv)
        and not request.is_limited
        and request.terminal is None
        # What is ignored here stays so; init itself must not ignore more than it does.
        and all(signal.getsignal(n) == signal.SIG_IGN for n in request.ignored_signals)
    )


def start(request: Request, descriptors: list[int]) -> int:
    """Returns the pid of the program, which runs. OSError if it cannot be executed."""
    os.umask(request.umask)
    moved = pre_exec.out_of_the_way(request, descriptors)
    refusal: OSError | None = None
    for path in _places(request):
        try:
            os.stat(path)  # cheaper than a try to execute it
            return os.posix_spawn(
                path,
                request.argv,
                request.environment,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, descriptor, number)
                    for number, descriptor in zip(request.numbers, moved, strict=True)
                ],
                setsid=True,
                setsigmask=[],
                setsigdef={*pre_exec.changed_signals(), signal.SIGTERM}
                - {*request.ignored_signals},
            )
        except (FileNotFoundError, NotADirectoryError) as error:
            refusal = refusal or error
        except OSError as error:  # it is there: that says more than where it is not
            if refusal is None or isinstance(refusal, FileNotFoundError | NotADirectoryError):
                refusal = error
    assert refusal is not None, "there is a place to look at"
    raise refusal


def _places(request: Request) -> list[str]:
    """Returns where the program may be, as execvp(3) looks for it."""
    name = request.argv[0]
    if "/" in name:
        return [name]
    return [os.path.join(place, name) for place in os.get_exec_path(request.environment)]
