"""The init process of a sandbox for functions. Runs in a fork of the server and never returns.

It sets up the namespaces, drops its privileges and starts the child. Then it waits for the child's
end, for orphans to reap, and for messages from the caller. Messages are JSON on one socket
(`line`):

    init says                              the caller says
    {"hello": true} and a pidfd of itself  "T"   SIGTERM to all
    {"failed": STEP, "errno": N, …}        "C"   SIGCONT to all
    {"stopped": true}                      "S"   SIGSTOP to all
    {"status": N, "cpu": S, "peak": B,     (closes the line: end at once)
     "timed_out": false,
     "is_uncovered": false}

It is process 1 of the pid namespace, so its end kills all processes of the sandbox.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import pickle
import resource
import select
import signal
import socket
import termios
import time
from typing import Any, NoReturn

from branching._exit_codes import EXIT_KILLED
from branching._linux import fd_passing, syscalls
from branching.process.sandbox import (
    mount_helper,
    netns,
    pre_exec,
    privileges,
)
from branching.process.sandbox.launch_request import Request
from branching.process.sandbox.masked_files import Watch
from branching.process.sandbox.rootfs import RootFS, bound_sockets

POLL_MILLISECONDS_MAX = 1 << 30
"""The kernel takes a wait as 32 bits. This is 12 days; a longer limit takes several waits."""
TIMEOUT_GRACE_SECONDS = 1.0
"""Between SIGTERM and the end when the time is over."""
_SIGNALS = {b"T": signal.SIGTERM, b"C": signal.SIGCONT, b"S": signal.SIGSTOP}
"""The signal that each message of the caller sends to all other processes."""


def run(descriptors: list[int]) -> NoReturn:
    """Makes the sandbox and supervises it, from inside of its namespaces, but for that of mounts.

    The descriptors are the pickled request, line, gate, and what the child is to have.
    """
    with open(descriptors[0], "rb") as file:
        request = pickle.load(file)
    assert isinstance(request, Request)
    line = socket.socket(fileno=descriptors[1])
    init = _Init(request, line, descriptors[2], descriptors[3:])
    try:
        init.prepare()
        pid = init.start()
        init.supervise(pid)
    except OSError as error:
        init.say(
            failed=init.step, errno=error.errno or 0, text=error.strerror or str(error),
            path=error.filename,
        )  # fmt: skip
    except BaseException as error:
        init.say(failed=init.step, errno=0, text=f"{type(error).__name__}: {error}", path=None)
    init.end(EXIT_KILLED)


class _Init:
    def __init__(
        self, request: Request, line: socket.socket, gate: int, descriptors: list[int]
    ) -> None:
        self._request = request
        self._line = line
        self._gate = socket.socket(fileno=gate)
        self._descriptors = descriptors
        self._watch: Watch | None = None
        self.step = "starting"

    def say(self, **words: Any) -> None:
        try:
            self._line.send(json.dumps(words).encode())
        except OSError:
            self.end(EXIT_KILLED)  # the caller is gone

    def prepare(self) -> None:
        request = self._request
        # This process may end, and its pid be reused, before the caller can look it up.
        fd_passing.send(self._line, b'{"hello": true}', [os.pidfd_open(os.getpid())])
        sandbox = request.sandbox
        self.step = "loading what runs in it"
        for name in request.preload:
            importlib.import_module(name)
        if not request.is_sandboxed:
            self._prepare_plain()
            return
        if request.is_user_namespace:
            self.step = "mapping the user into the namespace"
            _map_own_user(*request.user)
        self.step = "finding the sockets of other programs"
        sockets = bound_sockets()  # all that are named in this network, before it is left
        if not sandbox.network:
            self.step = "making a network"
            netns.enter()
        owner = request.owner or request.user
        isolate = self._isolate if request.is_session else None
        view = RootFS(sandbox, owner, sockets, isolate=isolate)
        try:
            writable = view.build()
        except OSError:
            self.step = view.step
            raise
        self._watch = view.watch
        self.step = "giving up privileges"
        outputs = [
            descriptor
            for number, descriptor in zip(self._request.numbers, self._descriptors, strict=True)
            if number in (1, 2)
        ]
        privileges.give_up(request.owner, writable, outputs, is_session=request.is_session)

    def _isolate(self, workspace: int) -> None:
        """Starts the mount helper, and enters a user namespace below that of the helper."""
        request = self._request
        place = request.numbers.index(request.mounter)
        stream = socket.socket(fileno=self._descriptors.pop(place))
        numbers = tuple(number for number in request.numbers if number != request.mounter)
        self._request = request._replace(numbers=numbers)
        with stream:
            whole = workspace if request.is_user_namespace else -1
            helper = mount_helper.MountHelper(stream, request.sandbox, whole)
        if request.owner is not None:
            os.setgroups([])
        syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
        helper.map_init(*(request.owner or request.user))
        helper.let_go()

    def _prepare_plain(self) -> None:
        """Prepares a process without a sandbox: it only finds its descendants."""
        request = self._request
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        self.step = "becoming the workspace's owner"
        if request.owner is not None:
            os.setgroups([])
            os.setresgid(request.owner[1], request.owner[1], request.owner[1])
            os.setresuid(request.owner[0], request.owner[0], request.owner[0])
        self.step = "entering the workspace"
        os.chdir(request.sandbox.view)

    def end(self, code: int) -> NoReturn:
        """Ends this process, and all processes of the sandbox with it."""
        if not self._request.is_sandboxed:
            _kill_descendants()
        os._exit(code)

    def start(self) -> int:
        self.step = "starting the process"
        self._woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake)
        if not self._request.is_sandboxed:
            # Without a pid namespace no process dies with us: end them after the server's death.
            signal.signal(signal.SIGTERM, lambda *_: None)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGTERM)
        self._started = time.monotonic()
        # No process inside may inspect or trace init, although it has the same user: set before the
        # first one is started. A program that is executed can inspect itself again.
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
        if self._request.is_terminal_own:
            self.step = "starting a session on the terminal"
            # Init leads the session, so that the child, in a process group of its own, can be
            # stopped by a key: the kernel does not stop a group that no process could continue.
            os.setsid()
            place = self._request.numbers.index(self._request.terminal or 0)
            fcntl.ioctl(self._descriptors[place], termios.TIOCSCTTY, 0)
        pid = os.fork()  # os.fork, as Python then gives the child other random numbers
        if pid == 0:
            signal.set_wakeup_fd(-1)
            pre_exec.run(self._request, self._gate, self._descriptors)
        if self._request.is_session:
            syscalls.drop_capabilities()  # only the session needs the one that was kept
        self._gate.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        return pid

    def supervise(self, pid: int) -> NoReturn:
        poll = select.poll()
        poll.register(self._line, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        if self._watch is not None:
            poll.register(self._watch, select.POLLPRI)
        limit = self._request.wall_seconds
        deadline = None if limit is None else self._started + limit
        timed_out = has_ended = False
        while True:
            wait = _milliseconds_until(deadline)
            ready = {descriptor for descriptor, _ in poll.poll(wait)}
            if self._watch is not None and not self._watch.is_whole():
                os.kill(-1, signal.SIGKILL)
                self._end(signal.SIGKILL, is_uncovered=True)
            if deadline is not None and time.monotonic() >= deadline:
                if timed_out:
                    self._end(signal.SIGKILL, timed_out=True)
                timed_out, deadline = True, time.monotonic() + TIMEOUT_GRACE_SECONDS
                self._tell_all(signal.SIGTERM)
            if self._woken in ready:
                if signal.SIGTERM in os.read(self._woken, 4096):
                    self.end(EXIT_KILLED)
                has_ended = True
            if has_ended:
                has_ended = False
                self._reap(pid, timed_out=timed_out)
            if self._line.fileno() in ready:
                word = self._heard()
                if not word:
                    self.end(EXIT_KILLED)
                self._tell_all(_SIGNALS[word])

    def _heard(self) -> bytes:
        """Returns the caller's next message; empty if the caller has ended."""
        try:
            return self._line.recv(16)
        except ConnectionResetError:
            return b""

    def _reap(self, pid: int, *, timed_out: bool) -> None:
        while True:
            try:
                found, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if found == 0:
                return
            if found != pid or self._request.is_session:
                continue  # a session continues in another process: the caller ends it
            if os.WIFSTOPPED(status):
                self.say(stopped=True)
            else:
                self._end(status, timed_out=timed_out)

    def _end(self, status: int, *, timed_out: bool = False, is_uncovered: bool = False) -> NoReturn:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.say(
            status=status, timed_out=timed_out, cpu=used.ru_utime + used.ru_stime,
            peak=used.ru_maxrss * 1024, seconds=time.monotonic() - self._started,
            is_uncovered=is_uncovered,
        )  # fmt: skip
        self.end(0)

    def _tell_all(self, number: int) -> None:
        """Signals every other process of the namespace, or every descendant."""
        if not self._request.is_sandboxed:
            _signal_descendants(number)
            return
        try:
            os.kill(-1, number)
            if number != signal.SIGSTOP:
                os.kill(-1, signal.SIGCONT)  # a stopped process hears it too
        except ProcessLookupError:
            pass


def _map_own_user(uid: int, gid: int) -> None:
    """Maps our user and group; without a mapping, files would belong to the overflow user."""
    for file, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{file}", "w") as target:
            target.write(text)


def _milliseconds_until(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    return min(max(0.0, deadline - time.monotonic()) * 1000 + 1, POLL_MILLISECONDS_MAX)


KILL_SECONDS_MAX = 5.0


def _signal_descendants(number: int) -> None:
    """Signals each descendant. Used where no pid namespace is available.

    This process is a subreaper: orphans become its children, so it can find all of them. One that
    has changed its user cannot be signalled.
    """
    for pid in _descendants_of(os.getpid()):
        try:
            os.kill(pid, number)
            if number != signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)  # a stopped process hears it too
        except (ProcessLookupError, PermissionError):
            continue


def _kill_descendants() -> None:
    """Kills all descendants until there are none, or for a bounded time.

    A process that forks faster than they are listed may live a little longer.
    """
    deadline = time.monotonic() + KILL_SECONDS_MAX
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return  # no child, no descendant: orphans become our children
        _signal_descendants(signal.SIGKILL)
        time.sleep(0.001)


def _descendants_of(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                words = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        parents.setdefault(int(words[1]), []).append(int(name))
    found = []
    waiting = [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found
