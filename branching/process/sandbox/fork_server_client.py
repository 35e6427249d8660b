"""The server's process, as the program has it that is its caller.

There is one for a process, started when it is first needed and gone soon after it was last needed.
A forked child does not use its parent's.
"""

from __future__ import annotations

import atexit
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

from branching._linux import fd_passing, rlimits
from branching.errors import ForkError
from branching.process.sandbox import fork_server
from branching.process.sandbox.errors import ServerGone

_BLOCKED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP}

_NEEDED_VARIABLES = ("LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "LD_PRELOAD", "LOCPATH")
"""How names are encoded, and where the loader finds libraries."""


_lock = threading.Lock()
_server: _Server | None = None


class _Server:
    """The running server of this process."""

    def __init__(self) -> None:
        self.identity = _identity()
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket = ours
        argv = [
            *(sys.executable, "-I"),
            *("-X", f"utf8={sys.flags.utf8_mode}"),  # names are to mean the same to both
            *(fork_server.__file__, str(its.fileno()), str(os.getpid())),
        ]
        # A key struck while it starts is not meant for it; it inherits what is blocked here.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        try:
            # Its directory must not keep a mount busy.
            self._process = subprocess.Popen(
                argv,
                cwd="/",
                env=_environment(),
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            ours.close()
            raise ForkError(
                f"the process that starts sandboxes could not be made: {error}; nothing ran"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            its.close()
        rlimits.restore_open_files(self._process.pid)  # to what it starts, too
        # It ends by itself, and has to be reaped, or it would stay as a zombie.
        threading.Thread(target=self._process.wait, name="sandbox server", daemon=True).start()

    def send(self, message: bytes, descriptors: Sequence[int]) -> None:
        """Sends one request. OSError when it is gone."""
        fd_passing.send(self.socket, message, descriptors)


def _environment() -> dict[str, str]:
    """Returns what the interpreter itself needs. Functions run in forks of the server, so they
    could read all of its environment.
    """
    return {name: os.environ[name] for name in _NEEDED_VARIABLES if name in os.environ}


def _identity() -> tuple[object, ...]:
    # Who is another by now (forked, changed its user or its mounts) needs another server.
    return os.getpid(), os.geteuid(), os.getegid(), os.stat("/proc/self/ns/mnt").st_ino


def send(message: bytes, descriptors: Sequence[int]) -> None:
    """Sends the server a request; starts one if need be. ServerGone when it did not hear it."""
    global _server  # noqa: PLW0603
    with _lock:
        if _server is not None and _server.identity == _identity():
            try:
                _server.send(message, descriptors)
                return
            except OSError as error:
                is_whole = (
                    len(descriptors) <= fd_passing.DESCRIPTORS_MAX
                )  # it has heard nothing yet
                if error.errno == errno.ETOOMANYREFS and is_whole:
                    raise ForkError(
                        "too many open files of this user are in transit between programs; "
                        "nothing ran",
                        hint=(
                            "start fewer concurrently, or raise the limit of open files: ulimit -n"
                        ),
                    ) from error
                # Else it has ended, for want of work.
        if _server is not None:
            _server.socket.close()
        _server = None
        _server = _Server()
        try:
            _server.send(message, descriptors)
        except OSError as error:
            raise ServerGone from error


def _forget() -> None:
    """At the end of this process, and in a forked child: there the server is the parent's, and the
    lock may have been held."""
    global _server, _lock  # noqa: PLW0603
    _lock = threading.Lock()
    if _server is not None:
        _server.socket.close()
        _server = None


os.register_at_fork(after_in_child=_forget)
atexit.register(_forget)
