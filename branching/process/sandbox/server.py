"""The server: forks for a caller that has threads. A program of its own, with one thread.

    python -I server.py SOCKET PARENT

A request is one message on the socket (SOCK_SEQPACKET): its clone flags, and as descriptors the
pickled request, `line`, `gate` and what the child is to have. Descriptors that one message cannot
carry come in messages before it. The server forks and forgets; all that follows is between init
and the caller. It ends when the caller closes the socket or dies, and when it was idle for a
while, for nothing should stay behind that nobody needs.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import time
from functools import cache

IDLE_SECONDS_MAX = 0.5
"""How long it stays without a request and without a running sandbox."""
DESCRIPTORS_MAX = 250
"""One message takes no more (the kernel's SCM_MAX_FD is 253)."""
MORE = b"more"
FOR_CALL = b" call"
"""Follows the flags where a function is to be run."""

_IGNORED = ("SIGINT", "SIGQUIT", "SIGHUP", "SIGTSTP", "SIGTTIN", "SIGTTOU")
"""Keys and hang-ups concern the caller and the command in front. SIGTERM still ends us."""


def main(socket_descriptor: int, parent: int) -> None:
    """Serves until nobody needs it."""
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The thread that started us may have blocked any: without SIGCHLD we would be deaf.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    # In a group of our own, yet in the caller's session: the terminal is to be passed on.
    os.setpgid(0, 0)
    woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    caller = socket.socket(fileno=socket_descriptor)
    parent_end = os.pidfd_open(parent)
    if os.getppid() != parent:
        return  # it died before we could watch it
    _serve(caller, parent_end, woken, wake)


def _serve(caller: socket.socket, parent_end: int, woken: int, wake: int) -> None:
    poll = select.poll()
    for descriptor in (caller.fileno(), parent_end, woken):
        poll.register(descriptor, select.POLLIN)
    running: set[int] = set()
    received: list[int] = []
    idle_since = time.monotonic()
    while True:
        left = None
        if not running:
            left = max(0.0, idle_since + IDLE_SECONDS_MAX - time.monotonic()) * 1000
        ready = {descriptor for descriptor, _ in poll.poll(left)}
        if parent_end in ready or (not ready and not running):
            return
        if woken in ready:
            os.read(woken, 4096)
            running -= _reaped()
            idle_since = time.monotonic()
        if caller.fileno() in ready:
            message, descriptors, _, _ = socket.recv_fds(caller, 64, DESCRIPTORS_MAX)
            if not message:
                return
            received += descriptors
            if message == MORE:
                continue
            if message.endswith(FOR_CALL):
                _load_for_calls()
            flags = int(message.removesuffix(FOR_CALL))
            pid = _start(flags, received, [caller.fileno(), parent_end, woken, wake])
            running.add(pid)
            for descriptor in received:
                os.close(descriptor)
            received = []


def _start(flags: int, descriptors: list[int], own: list[int]) -> int:
    from branching.process.sandbox import init, kernel, mounts
    from branching.process.sandbox.request import Request

    _prepare()
    # What is read here, a fork need not read again: its memory would have to be copied for that.
    request = _read(descriptors[0])
    assert isinstance(request, Request)
    mounts.read()
    try:
        pid = kernel.clone(flags)
    except OSError as error:
        os.write(descriptors[1], b'{"failed": "clone", "errno": %d}' % (error.errno or 0))
        return -1
    if pid:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        for descriptor in (*own, descriptors[0]):
            os.close(descriptor)
        init.run(request, descriptors[1:])
    finally:
        os._exit(init.EXIT_KILLED)


@cache
def _prepare() -> None:
    """Does once what each of those that are forked would do for itself."""
    import pickle  # noqa: F401

    from branching.process.sandbox import child, kernel
    from branching.process.sandbox import filter as call_filter

    call_filter.program(kernel.MACHINE)
    child.changed_signals()
    gc.disable()  # a collection in a fork would copy all that it looks at


def _load_for_calls() -> None:
    """Loads once what each child would load for itself."""
    from branching.process import courier, homeway  # noqa: F401
    from branching.process.sandbox import call  # noqa: F401


def _read(descriptor: int) -> object:
    import pickle

    with open(descriptor, "rb", closefd=False) as file:
        return pickle.load(file)


def _reaped() -> set[int]:
    found: set[int] = set()
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        found.add(pid)


if __name__ == "__main__":
    # In isolated mode nothing but the standard library is found by itself.
    sys.path.insert(0, os.path.realpath(f"{__file__}/../../../.."))
    main(int(sys.argv[1]), int(sys.argv[2]))
