"""The caller's side of the sandbox: starting processes in it, from any thread."""

from __future__ import annotations

import array
import errno
import json
import os
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from branching._linux import rlimits, syscalls
from branching._programs import find_branchfs
from branching.errors import ForkError, MountError, NamespaceError, ProcessBranchError
from branching.process.sandbox import errors, seccomp
from branching.process.sandbox.launch_request import HERE, Request

START_SECONDS_MAX = 60.0
"""A sandbox starts in milliseconds. This limits the wait if a mount of another program hangs."""

_DEFAULT_SIGNALS = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}

_CREDENTIALS = struct.Struct("=iII")
_ANCILLARY_BYTES = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(struct.calcsize("i"))


class LaunchRefused(Exception):
    """The program could not be executed. The sandbox is gone."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.errno = number
        self.strerror = text


class SandboxHandle:
    """A process in its sandbox. It belongs to the thread that started it, but for `kill`."""

    def __init__(self, line: socket.socket, init_end: int, *, is_sandboxed: bool) -> None:
        self._line = line
        self._is_sandboxed = is_sandboxed
        self.end = init_end
        """A descriptor that is readable when everything in the sandbox is dead."""
        self.pid = 0
        """The pid of the process in this process's namespace."""
        self.report: dict[str, Any] = {}
        """The report of init about the end; empty before it."""
        self.is_stopped = False
        """Whether it was stopped (Ctrl-Z) since the last check."""
        self.launcher: int | None = None
        """Of a command: the pid of our child that waits for init. It ends with everything else."""

    def fileno(self) -> int:
        """The descriptor that has something to `read`."""
        return self._line.fileno()

    def read(self) -> bool:
        """Reads a message of init, without waiting. Returns False after the last one."""
        try:
            message, _ = _take(self._line, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not message:
            return False
        words = json.loads(message)
        if words.get("stopped"):
            self.is_stopped = True
        elif "status" in words:
            self.report = words
        return True

    def terminate(self) -> None:
        """Sends SIGTERM to every process in the sandbox."""
        self._say(b"T")

    def pause(self) -> None:
        """Sends SIGSTOP to every process in the sandbox."""
        self._say(b"S")

    def resume(self) -> None:
        """Sends SIGCONT to every process in the sandbox."""
        self._say(b"C")

    def kill(self) -> None:
        """Kills everything in the sandbox. Does not wait."""
        try:
            if not self._is_sandboxed:
                # The kernel would not take its descendants along: it does so itself.
                self._line.shutdown(socket.SHUT_RDWR)
                return
            signal.pidfd_send_signal(self.end, signal.SIGKILL)
        except ProcessLookupError:
            pass
        except PermissionError:
            # Root without the capability to signal others: init ends when the line does.
            self._line.shutdown(socket.SHUT_RDWR)

    def await_end(self, seconds: float) -> bool:
        """Waits until everything in the sandbox is dead. False if it is not in time."""
        poll = select.poll()
        poll.register(self.end, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def close(self) -> None:
        """Closes the descriptors, and reaps the launcher."""
        has_ended = self.await_end(0)
        self._line.close()
        os.close(self.end)
        if self.launcher is not None:
            _reap(self.launcher, is_waited_for=has_ended)

    def _say(self, word: bytes) -> None:
        try:
            self._line.send(word)
        except OSError:
            pass  # it has ended


def start(
    request: Request, descriptors: Sequence[int], admit: Callable[[int], None] | None = None
) -> SandboxHandle:
    """Starts a process in a new sandbox; returns when its program runs.

    Args:
        request: The process to start.
        descriptors: The descriptors for the process, in the order of `request.numbers`.
        admit: Called with the pid before any code of the user runs. An exception of it ends the
            sandbox.

    Raises:
        NamespaceError: The sandbox cannot be made.
        ForkError: No process can be made.
        LaunchRefused: The program cannot be executed.
    """
    if not syscalls.is_known_machine():
        raise NamespaceError(
            f"the sandbox does not support the system calls of this machine ({syscalls.MACHINE}); "
            "nothing ran",
            hint='use isolation="none" to run without one',
        )
    if request.is_sandboxed:
        _refuse_ways_out(request, descriptors)
    for is_last_try in (False, True):
        try:
            return _start(request, descriptors, admit)
        except errors.ServerGone as gone:
            # It was idle for too long, and ended before it got the request.
            if is_last_try:
                raise ForkError(
                    "the process that starts sandboxes does not answer; nothing ran",
                    hint=f"does `{sys.executable} -I -c pass` work?",
                ) from gone
    raise AssertionError("both tries return or raise")


def _launch(request: Request, line: int, gate: int, descriptors: Sequence[int]) -> int:
    """Starts `branchfs sandbox`; returns its pid.

    The program gets each descriptor with the number it has here: duplicated onto itself it stays
    open (posix_spawn(3) clears its close-on-exec flag for that).
    """
    try:
        program = find_branchfs()
    except MountError as error:
        raise NamespaceError(
            f"there is no program {error.path!r}, which starts sandboxes; nothing ran",
            hint=error.hint,
            path=error.path,
        ) from error
    blob = os.memfd_create("request", os.MFD_CLOEXEC)
    try:
        os.write(blob, _packed(request, line, gate, descriptors))
        sent = dict.fromkeys([blob, line, gate, *descriptors])
        return os.posix_spawn(
            program,
            ["branchfs", "sandbox", str(blob)],
            {},
            file_actions=[(os.POSIX_SPAWN_DUP2, number, number) for number in sent],
            # In a new process group, but in our session, which owns the terminal.
            setpgroup=0,
            setsigmask=[],
            setsigdef=_DEFAULT_SIGNALS,
        )
    except OSError as error:
        raise ForkError(f"no process could be made: {error.strerror}; nothing ran") from error
    finally:
        os.close(blob)


def _packed(request: Request, line: int, gate: int, descriptors: Sequence[int]) -> bytes:
    """Returns the request as JSON; text that may be any bytes has one character a byte."""
    sandbox = request.sandbox
    fields = {
        "parent": os.getpid(),
        "line": line,
        "gate": gate,
        "descriptors": [*zip(request.numbers, descriptors, strict=True)],
        "argv": [*map(_text, request.argv)],
        "environment": [(_text(k), _text(v)) for k, v in request.environment.items()],
        "owner": request.owner,
        "user": request.user,
        "is_sandboxed": request.is_sandboxed,
        "is_user_namespace": request.is_user_namespace,
        "is_limited": request.is_limited,
        "ignored_signals": request.ignored_signals,
        "umask": request.umask,
        "terminal": request.terminal,
        "is_terminal_own": request.is_terminal_own,
        "wall_seconds": request.wall_seconds,
        "filter": seccomp.program(syscalls.MACHINE).decode("latin-1"),
        "open_files": rlimits.open_files_before(),
        "sandbox": {
            "view": _text(sandbox.view),
            "at": _text(sandbox.at),
            "mount": None if sandbox.mount is None else _text(sandbox.mount),
            "private": [*map(_text, sandbox.private)],
            "hide": [*map(_text, sandbox.hide)],
            "network": sandbox.network,
            "home": None if sandbox.home is None else _text(sandbox.home),
            "beside": [(_text(source), _text(place)) for source, place in sandbox.beside],
            "caches": [*map(_text, sandbox.caches)],
            "directory": None if sandbox.directory is None else _text(sandbox.directory),
            "keep": [*map(_text, sandbox.keep)],
        },
    }
    return json.dumps(fields).encode()


def _text(text: str | os.PathLike[str]) -> str:
    return os.fsencode(text).decode("latin-1")


def _reap(pid: int, *, is_waited_for: bool) -> None:
    """Reaps a launcher. One that hangs is left to the system: it ends with what it waits for."""
    try:
        os.waitpid(pid, 0 if is_waited_for else os.WNOHANG)
    except ChildProcessError:
        pass  # this program ignores SIGCHLD, or waits for any child


def _refuse_ways_out(request: Request, descriptors: Sequence[int]) -> None:
    private = {os.fsencode(path) for path in request.sandbox.private}
    for number, descriptor in zip(request.numbers, descriptors, strict=True):
        mode = os.fstat(descriptor).st_mode
        what = None
        if stat.S_ISDIR(mode):
            what = "a directory"
        elif stat.S_ISSOCK(mode) and _peer(descriptor) in private:
            what = "a connection to the workspace's control socket"
        if what is not None:
            raise NamespaceError(
                f"descriptor {number} is {what}, which leads out of the sandbox; nothing ran",
                hint="redirect it from a file or /dev/null",
            )


def _peer(descriptor: int) -> bytes | None:
    """Returns the path of the server that a Unix socket is connected to, if it has one."""
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        if copy.family != socket.AF_UNIX:
            return None
        try:
            name = copy.getpeername()
        except OSError:
            return None  # not connected
    return os.fsencode(name)


def _start(
    request: Request, descriptors: Sequence[int], admit: Callable[[int], None] | None
) -> SandboxHandle:
    line, inits_line = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gate, childs_gate = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    started: SandboxHandle | None = None
    launcher: int | None = None
    ends: list[int] = []
    try:
        for ours in (line, gate):
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with inits_line, childs_gate:
            if request.argv:
                launcher = _launch(request, inits_line.fileno(), childs_gate.fileno(), descriptors)
            else:
                _ask_server(request, inits_line.fileno(), childs_gate.fileno(), descriptors)
        deadline = time.monotonic() + START_SECONDS_MAX
        init, _ = _hear(line, deadline, ends)
        if init is None:
            if launcher is not None:
                raise ForkError(
                    "the program that starts sandboxes (branchfs sandbox) has failed; nothing ran",
                    hint=f"is {find_branchfs()} of this version?",
                )
            raise errors.ServerGone
        started = SandboxHandle(line, _only(ends), is_sandboxed=request.is_sandboxed)
        started.launcher = launcher
        _pass_gate(started, line, gate, deadline, admit)
        return started
    except BaseException:
        if started is not None:
            started.kill()
            started.await_end(START_SECONDS_MAX)
            os.close(started.end)
        line.close()  # without the caller's end init ends, and the launcher with it
        gate.close()
        if launcher is not None:
            _reap(launcher, is_waited_for=True)
        raise
    finally:
        gate.close()


def _ask_server(request: Request, line: int, gate: int, descriptors: Sequence[int]) -> None:
    import pickle

    from branching.process.sandbox import fork_server_client

    blob = os.memfd_create("request", os.MFD_CLOEXEC)
    with open(blob, "wb") as file:
        pickle.dump(request, file)
        file.flush()
        os.lseek(blob, 0, os.SEEK_SET)
        sent = [blob, line, gate, *descriptors]
        fork_server_client.send(b"%d" % _flags(request), sent)


def _pass_gate(
    started: SandboxHandle,
    line: socket.socket,
    gate: socket.socket,
    deadline: float,
    admit: Callable[[int], None] | None,
) -> None:
    pid, word = _hear(gate, deadline, line=line)
    if pid is None:
        _raise_ended(started)
    assert pid is not None
    if word != HERE:
        reason = os.fsdecode(word.partition(b" ")[2])
        raise ProcessBranchError(f"the process could not be prepared: {reason}; nothing ran")
    started.pid = pid
    if admit is not None:
        admit(pid)
        gate.send(b"go")
    _, refusal = _hear(gate, deadline)
    if refusal:
        number, _, text = refusal.partition(b" ")
        started.await_end(START_SECONDS_MAX)
        raise LaunchRefused(int(number), os.fsdecode(text) or os.strerror(int(number)))


def _only(ends: list[int]) -> int:
    """Takes the descriptor that came along."""
    if not ends:  # there was no room for it
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return ends.pop()


def _hear(
    stream: socket.socket,
    deadline: float,
    descriptors: list[int] | None = None,
    *,
    line: socket.socket | None = None,
) -> tuple[int | None, bytes]:
    """Waits for a message. Returns its sender's pid in our namespace, and the message.

    A passed descriptor is added to `descriptors`. At the end of the stream it returns None and an
    empty message. A reported failure is raised.
    """
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    if line is not None:
        poll.register(line, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll(max(0, deadline - time.monotonic()) * 1000)}
    if not ready:
        raise NamespaceError(
            f"the sandbox was not ready after {START_SECONDS_MAX:.0f} s; nothing ran",
            hint="a mount that does not answer (a dead network file system?) can be the reason: "
            "see /proc/mounts",
        )
    if stream.fileno() not in ready:
        return None, b""
    message, ancillary = _take(stream)
    if not message:
        return None, b""
    if message.startswith(b'{"failed"'):
        raise errors.named(json.loads(message))
    pid = None
    for _, kind, data in ancillary:
        if kind == socket.SCM_CREDENTIALS:
            pid = _CREDENTIALS.unpack(data)[0]
        elif kind == socket.SCM_RIGHTS and descriptors is not None:
            descriptors += array.array("i", data)
    return pid, message


def _take(stream: socket.socket, flags: int = 0) -> tuple[bytes, list[tuple[int, int, bytes]]]:
    """Receives a message and its sender.

    If the peer ended before it had read all our messages, the connection is reset, and the error is
    reported before its last message.
    """
    for is_last_try in (False, True):
        try:
            return stream.recvmsg(65536, _ANCILLARY_BYTES, flags | socket.MSG_CMSG_CLOEXEC)[:2]
        except ConnectionResetError:
            if is_last_try:
                raise
    raise AssertionError("both tries return or raise")


def _raise_ended(started: SandboxHandle) -> None:
    message = b""
    try:
        message, _ = _take(started._line, socket.MSG_DONTWAIT)
    except OSError:
        pass
    if message.startswith(b'{"failed"'):
        raise errors.named(json.loads(message))
    raise ProcessBranchError("the sandbox was killed while it was made; nothing ran")


def _flags(request: Request) -> int:
    if not request.is_sandboxed:
        return 0
    flags = (
        syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS
    )
    return flags | (syscalls.CLONE_NEWUSER if request.is_user_namespace else 0)
