"""A preforked init process that waits for its request.

The fork and the copying of its pages take a fifth of the time to start a process in a sandbox. The
server does that while the previous sandbox is running. A preforked init is in the namespaces of the
last request, except for the mount namespace, which would miss later mounts. It is a copy of a
server that has read no request, so it contains no data of an earlier one.
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
    """The server's handle. The init exits when it is closed, or when the server dies."""

    def __init__(self, flags: int, ours: Sequence[int]) -> None:
        """Forks the init into new namespaces.

        Args:
            flags: The namespaces (CLONE_NEW...).
            ours: Descriptors to close in the init.

        Raises:
            OSError: The namespaces are not available.
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
        """Sends the request and closes the handle.

        Returns:
            False if the init has died, or there are more descriptors than one message can carry.
            The server forks a new init then.
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
        """Closes the connection. Without a request the init ends."""
        self._stream.close()


def fork_for(flags: int, ours: Sequence[int], descriptors: list[int]) -> int:
    """Forks an init that gets its request from `descriptors`, and returns its pid.

    Raises:
        OSError: The namespaces are not available.
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
    """Runs the code that init runs for a request, once without effect.

    The memory pages that it writes are copied in advance. Only this process is changed.
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
        with suppress(OSError):  # the next request reports it
            privileges.give_up_first()
