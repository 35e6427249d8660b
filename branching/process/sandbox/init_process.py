"""The first process of a sandbox. Runs in a fork of the server; never returns.

It makes the surroundings, gives up its privileges, starts the child, and then only waits: for the
child's end, for orphans to reap, for a word from the caller. Its words with the caller go over
one socket (`line`), a message each, as JSON:

    init says                              the caller says
    {"hello": true} and a pidfd of itself  "T"   SIGTERM to all
    {"failed": STEP, "errno": N, …}        "C"   SIGCONT to all
    {"stopped": true}                      "S"   SIGSTOP to all
    {"status": N, "cpu": S, "peak": B,     (closes the line: end at once)
     "timed_out": false,
     "is_uncovered": false}

Its end is the end of everything: it is process 1 of the namespace.
"""

from __future__ import annotations

import fcntl
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

from branching._exit_codes import EXIT_CANNOT_EXECUTE, EXIT_KILLED
from branching._linux import fd_passing, syscalls
from branching.process.sandbox import (
    descendants,
    netns,
    posix_spawn,
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
"""What each word of the caller's is to all others in here."""


def run(descriptors: list[int]) -> NoReturn:
    """Makes the sandbox and attends it. We are in its namespaces, but for that of mounts.

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
        self._gate: socket.socket | None = socket.socket(fileno=gate)
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
        # We may be gone, and our number another's, before the caller can look us up by it.
        fd_passing.send(self._line, b'{"hello": true}', [os.pidfd_open(os.getpid())])
        sandbox = request.sandbox
        if not request.is_sandboxed:
            self._prepare_plain()
            return
        if request.is_user_namespace:
            self.step = "mapping our user into the namespace"
            _map_own_user(*request.user)
        self.step = "finding the sockets of other programs"
        sockets = bound_sockets()  # all that are named in this network, before it is left
        if not sandbox.network:
            self.step = "making a network"
            netns.enter()
        owner = request.owner or request.user
        view = RootFS(sandbox, owner, sockets)
        try:
            writable = view.build()
        except OSError:
            self.step = view.step
            raise
        self._watch = view.watch
        self.step = "giving up privileges"
        outputs = [
            descriptor
            for number, descriptor in zip(request.numbers, self._descriptors, strict=True)
            if number in (1, 2)
        ]
        privileges.give_up(request.owner, writable, outputs)

    def _prepare_plain(self) -> None:
        """Without a sandbox: to know our descendants is the most that can be done."""
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
        """Ends, and all that was started with it."""
        if not self._request.is_sandboxed:
            descendants.kill_all()
        os._exit(code)

    def start(self) -> int:
        assert self._gate is not None, "nobody has passed it"
        self.step = "starting the process"
        self._woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake)
        if not self._request.is_sandboxed:
            # Nobody dies with us: told of the server's death, we still have to end the others.
            signal.signal(signal.SIGTERM, lambda *_: None)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGTERM)
        self._started = time.monotonic()
        # Nobody inside may look at us or trace us, though we are the same user: said before there
        # is anybody. A program that is executed becomes visible to itself again.
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
        if self._request.is_terminal_own:
            self.step = "making a session on the terminal"
            # We lead it, so that the child, in a group of its own beside us, can be stopped by a
            # key: the kernel stops nobody whom nobody in the session could wake.
            os.setsid()
            place = self._request.numbers.index(self._request.terminal or 0)
            fcntl.ioctl(self._descriptors[place], termios.TIOCSCTTY, 0)
        if posix_spawn.can_be(self._request):
            return self._spawn(self._gate)
        # Only a function needs what Python does around a fork (random numbers of its own).
        pid = syscalls.clone(0) if self._request.argv else os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            pre_exec.run(self._request, self._gate, self._descriptors)
        self._gate.close()
        self._gate = None
        for descriptor in self._descriptors:
            os.close(descriptor)
        return pid

    def _spawn(self, gate: socket.socket) -> int:
        try:
            pid = posix_spawn.start(self._request, self._descriptors)
        except OSError as error:
            gate.send(pre_exec.HERE)
            gate.send(pre_exec.refusal(error))
            self.end(EXIT_CANNOT_EXECUTE)
        fd_passing.send(gate, pre_exec.RUNS, [os.pidfd_open(pid)])
        return pid

    def supervise(self, pid: int) -> NoReturn:
        poll = select.poll()
        poll.register(self._line, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        if self._watch is not None:
            poll.register(self._watch, select.POLLPRI)
        if self._gate is not None:
            poll.register(self._gate, select.POLLIN)
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
            if self._gate is not None and self._gate.fileno() in ready:
                # The caller has closed it, and so knows by which number to call the process.
                poll.unregister(self._gate)
                self._gate.close()
                self._gate = None
            if has_ended and self._gate is None:
                has_ended = False
                self._reap(pid, timed_out=timed_out)
            if self._line.fileno() in ready:
                word = self._heard()
                if not word:
                    self.end(EXIT_KILLED)
                self._tell_all(_SIGNALS[word])

    def _heard(self) -> bytes:
        """Returns the caller's next word; none if it is gone, and may not have read ours."""
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
            if found != pid:
                continue
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
        """Signals every process of the namespace but ourselves, or every descendant."""
        if not self._request.is_sandboxed:
            descendants.signal_all(number)
            return
        try:
            os.kill(-1, number)
            if number != signal.SIGSTOP:
                os.kill(-1, signal.SIGCONT)  # a stopped process hears it too
        except ProcessLookupError:
            pass


def _map_own_user(uid: int, gid: int) -> None:
    """Stays who we are: without a mapping files would belong to nobody."""
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
