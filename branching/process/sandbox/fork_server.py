"""The server: forks for a caller that has threads. A program of its own, with one thread.

    python -I fork_server.py SOCKET PARENT

A request is one message on the socket (SOCK_SEQPACKET). It has the clone flags, and as descriptors
the pickled request, `line`, `gate` and the descriptors for the child. The server sends it to an
init process, which is usually preforked (`prefork`). After that, init and the caller communicate
directly. The server exits when the caller closes the socket or dies, and after an idle time.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from branching.process.sandbox.prefork import PreforkedInit

IDLE_SECONDS_MAX = 0.5
"""How long it stays without a request and without a running sandbox."""

_IGNORED = ("SIGINT", "SIGQUIT", "SIGHUP", "SIGTSTP", "SIGTTIN", "SIGTTOU")
"""Keys and hang-ups concern the caller and the command in front. SIGTERM still ends us."""


def main(socket_descriptor: int, parent: int) -> None:
    """Serves requests until the caller has gone, or the idle time is over."""
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The thread that started this process may have blocked any, also SIGCHLD, which it needs.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    # In a new process group, but in the caller's session, which owns the terminal.
    os.setpgid(0, 0)
    woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    for descriptor in (0, 1, 2, socket_descriptor):
        os.set_inheritable(descriptor, False)  # as all others: only sent descriptors are inherited
    caller = socket.socket(fileno=socket_descriptor)
    parent_end = os.pidfd_open(parent)
    if os.getppid() != parent:
        return  # it died before it could be watched
    _serve(caller, parent_end, woken, wake)


def _serve(caller: socket.socket, parent_end: int, woken: int, wake: int) -> None:
    from branching._linux import fd_passing

    poll = select.poll()
    for descriptor in (caller.fileno(), parent_end, woken):
        poll.register(descriptor, select.POLLIN)
    inits = _Inits([caller.fileno(), parent_end, woken, wake])
    idle_since = time.monotonic()
    while True:
        left = None
        if inits.lack_spare:
            left = 0.0
        elif not inits.running:
            left = max(0.0, idle_since + IDLE_SECONDS_MAX - time.monotonic()) * 1000
        ready = {descriptor for descriptor, _ in poll.poll(left)}
        if not ready and inits.lack_spare:
            inits.fork_ahead()
            continue
        if parent_end in ready or not ready:
            break
        if woken in ready:
            os.read(woken, 4096)
            inits.forget(_reaped())
            idle_since = time.monotonic()
        if caller.fileno() in ready:
            message, descriptors = fd_passing.receive(caller)
            if not message:
                break
            inits.start(int(message), descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
    inits.dismiss_spare()


class _Inits:
    """The inits that run, and the spare one."""

    def __init__(self, own: list[int]) -> None:
        self._own = own
        self._flags = 0
        self._prefork: PreforkedInit | None = None
        self.running: set[int] = set()
        self.lack_spare = False
        """Whether to prefork an init: another request is likely to follow."""

    def start(self, flags: int, descriptors: list[int]) -> None:
        """Sends a request to the preforked init if it has the same flags, else to a new one."""
        from branching.process.sandbox import prefork

        _prepare()
        ready, self._prefork = self._prefork, None
        if ready is not None and ready.flags != flags:
            ready.let_go()
            ready = None
        try:
            if ready is not None and ready.hand(descriptors):
                self.running.add(ready.pid)
            else:
                self.running.add(prefork.fork_for(flags, self._own, descriptors))
        except OSError as error:
            os.write(descriptors[1], b'{"failed": "clone", "errno": %d}' % (error.errno or 0))
            return
        self._flags = flags
        self.lack_spare = True

    def fork_ahead(self) -> None:
        """Makes the spare one, of the kind that was asked for last."""
        from branching.process.sandbox.prefork import PreforkedInit

        self.lack_spare = False
        with suppress(OSError):  # the next request reports it
            self._prefork = PreforkedInit(self._flags, self._own)

    def forget(self, ended: set[int]) -> None:
        """Takes notice of ends. A spare that died is replaced after the next request."""
        self.running -= ended
        if self._prefork is not None and self._prefork.pid in ended:
            self._prefork.let_go()
            self._prefork = None

    def dismiss_spare(self) -> None:
        """Ends the preforked init and waits until it has ended."""
        if self._prefork is not None:
            os.kill(self._prefork.pid, signal.SIGKILL)
            os.waitpid(self._prefork.pid, 0)


@cache
def _prepare() -> None:
    """Does once what each of those that are forked would do for itself."""
    from branching._linux import syscalls
    from branching.process.functions import result_channel  # noqa: F401
    from branching.process.sandbox import (
        pre_exec,
        run_function,  # noqa: F401  (what each child would load for itself)
    )
    from branching.process.sandbox import seccomp as call_filter

    call_filter.program(syscalls.MACHINE)
    pre_exec.changed_signals()
    gc.disable()  # a collection in a fork would copy all that it looks at


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
    # In isolated mode only the standard library is on the import path.
    sys.path.insert(0, os.path.realpath(f"{__file__}/../../../.."))
    main(int(sys.argv[1]), int(sys.argv[2]))
