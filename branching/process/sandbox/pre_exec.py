"""The process of a function, from its fork off init to the first instruction of the user's.

With limits it waits at the gate until the caller has applied them, so that nothing of the user's
ever runs without. The gate closes without a message when the function is called.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
from functools import cache
from typing import NoReturn

from branching._exit_codes import EXIT_CANNOT_EXECUTE
from branching._linux import syscalls
from branching.process.sandbox.launch_request import HERE, Request

_STANDARD = (0, 1, 2)


def run(request: Request, inits_gate: socket.socket, descriptors: list[int]) -> NoReturn:
    """Becomes the process. Never returns."""
    gate = _place(request, inits_gate.fileno(), descriptors)
    try:
        os.umask(request.umask)
        _reset_signals(request)
        if request.terminal is not None:
            _take_terminal(request.terminal)
        else:
            os.setsid()
        gate.send(HERE)
        if request.is_limited and not gate.recv(16):
            os._exit(EXIT_CANNOT_EXECUTE)  # the caller has given up
        _call(request, gate)
    except BaseException as error:
        gate.send(b"0 %s" % os.fsencode(f"{type(error).__name__}: {error}"))
    os._exit(EXIT_CANNOT_EXECUTE)


def out_of_the_way(request: Request, descriptors: list[int]) -> list[int]:
    """Returns copies above all numbers that are wanted: none is overwritten before it is placed."""
    above = max((*request.numbers, *_STANDARD)) + 1
    return [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in descriptors]


def _place(request: Request, gate: int, descriptors: list[int]) -> socket.socket:
    """Gives each descriptor the number it is to have, and closes all that was not sent."""
    gate, *moved = out_of_the_way(request, [gate, *descriptors])
    for number, descriptor in zip(request.numbers, moved, strict=True):
        os.dup2(descriptor, number)
    wanted = {*request.numbers, gate}
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in wanted:
            try:
                os.close(int(name))
            except OSError:
                pass  # the one that listed the directory
    return socket.socket(fileno=gate)


@cache
def changed_signals() -> tuple[int, ...]:
    """Lists the signals that this process does not treat in the default way. To be asked first
    when all handlers are set: looking at each of them takes its time.
    """
    return tuple(n for n in signal.valid_signals() if signal.getsignal(n) != signal.SIG_DFL)


def _reset_signals(request: Request) -> None:
    for number in (*changed_signals(), signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    for number in request.ignored_signals:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _take_terminal(terminal: int) -> None:
    """Puts us in front on the terminal, as a shell does, before the program can say a word.

    Were it left to the caller, a key that is struck at the first output would still go to the
    caller's group.
    """
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
    try:
        os.tcsetpgrp(terminal, os.getpgrp())
    except OSError:
        pass  # the terminal is gone (hung up): the program will see that itself
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTTOU])


def _call(request: Request, gate: socket.socket) -> NoReturn:
    from branching.process.sandbox import run_function

    gate.close()
    # What a change of user has taken: a look at our own /proc.
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    run_function.run(request)
