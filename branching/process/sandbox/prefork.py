"""An init that is forked before anybody asks for it, and waits for its request.

To fork, and to copy the pages that a fork writes on, takes a fifth of the time until a process
runs in its sandbox. The server does it while the sandbox before is at work. A spare is in the
namespaces that were asked for last, but not in a mount table of its own: what is mounted meanwhile
would be missing there. It is a copy of a server that has read no request, and so holds nothing of
an earlier one.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from branching._exit_codes import EXIT_KILLED
from branching._linux import fd_passing, mountinfo, syscalls
from branching.process.sandbox import init_process, privileges, rootfs
from branching.process.sandbox.config import Sandbox

_REQUEST = b"request"


class PreforkedInit:
    """The server's hand on it. It ends when it is let go of, or the server dies."""

    def __init__(self, flags: int, ours: Sequence[int]) -> None:
        """Forks it into the namespaces of `flags`; the descriptors `ours` stay the server's.

        OSError when that cannot be had.
        """
        self.flags = flags
        self._stream, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            try:
                ours = [self._stream.fileno(), *ours]
                self.pid = _fork(flags, ours, lambda: _wait(its, is_sandboxed=flags != 0))
            except OSError:
                self.let_go()
                raise

    def hand(self, descriptors: Sequence[int]) -> bool:
        """Hands it its request, and lets go of it. False when it is gone, or these are more than
        can be passed on at once: a fork has them anyway.
        """
        try:
            if len(descriptors) <= fd_passing.DESCRIPTORS_MAX:
                socket.send_fds(self._stream, [_REQUEST], descriptors)
                return True
        except OSError:
            pass
        finally:
            self.let_go()
        return False

    def let_go(self) -> None:
        """Sends nothing more: without a request it ends."""
        self._stream.close()


def fork_for(flags: int, ours: Sequence[int], descriptors: list[int]) -> int:
    """Forks an init for a request that is here already; returns its pid. OSError when that cannot
    be had.
    """
    return _fork(flags, ours, lambda: init_process.run(descriptors))


def _fork(flags: int, ours: Sequence[int], become: Callable[[], object]) -> int:
    pid = syscalls.clone(flags & ~syscalls.CLONE_NEWNS)
    if pid:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        for descriptor in ours:
            os.close(descriptor)
        become()
    finally:
        os._exit(EXIT_KILLED)


def _wait(its: socket.socket, *, is_sandboxed: bool) -> None:
    _rehearse(is_sandboxed=is_sandboxed)
    message, descriptors = fd_passing.receive(its)
    if message:
        its.close()
        init_process.run(descriptors)


def _rehearse(*, is_sandboxed: bool) -> None:
    """Does ahead what init can do without a request, or would do: once in vain, to have the pages
    that it writes on copied by then. Changes nothing but this process.
    """
    pickle.loads(pickle.dumps(Sandbox(view=Path("/"), at=Path("/"))))
    json.dumps({"status": 0, "cpu": 0.0})
    os.get_exec_path({"PATH": "/"})
    one, other = socket.socketpair()
    with one, other:
        socket.send_fds(one, [b"hello"], [0])
    if is_sandboxed:
        mountinfo.read_table()
        rootfs.bound_sockets()
        with suppress(OSError):  # it will be tried again, and told
            privileges.give_up_first()
