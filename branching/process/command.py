"""One program, run in a directory until it ends or is killed, with its whole process group.

The thread that calls `run()` owns the process: it alone reads its output, signals it and reaps
it, waiting for all of this at one place. Other threads only ring a bell (`kill()`). The process
leads a session of its own, hence a process group, and is reaped last: as long as it is not, its
number cannot be given to another group, so a signal never reaches a stranger. When it ends, what
it left behind in its group is killed with it.

What leaves the group (a daemon with a session of its own) is not caught here: that takes a
process namespace.

Exit codes are the shell's: 126 cannot be executed, 127 not found, 128+n killed by signal n.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from branching.errors import ForkError, ProcessBranchError
from branching.process.cgroup import Scope
from branching.process.gate import Gate
from branching.process.owner import Owner
from branching.process.terminal import Terminal

Sink = Callable[[bytes], None] | int | None
"""Where an output goes: a function that is handed the bytes, a descriptor, or None for ours."""

EXIT_CANNOT_EXECUTE = 126
EXIT_NOT_FOUND = 127
EXIT_SIGNAL_BASE = 128
EXIT_KILLED = EXIT_SIGNAL_BASE + signal.SIGKILL

SCORE_FD = 3
SCORE_BYTES_MAX = 4096
"""Of what is written to the score descriptor the end is kept."""
REAP_SECONDS_MAX = 10.0
"""SIGKILL works at once unless the kernel itself is stuck; then waiting longer does not help."""
ZOMBIE_CHECK_SECONDS = 0.003
"""Killed processes die sooner. From then on the process table is read, which costs as long."""
STOP_POLL_SECONDS = 0.1
"""How often a command on the terminal is asked whether Ctrl-Z stopped it."""

_GROUP_POLL_SECONDS = 0.0005
_READ_BYTES = 65536
_DRAIN_BYTES_MAX = 1 << 20
"""Above what a pipe holds: an escaped process that goes on writing does not keep us reading."""
_SCORE_WRAPPER = f'exec {SCORE_FD}>"/proc/self/fd/$0"; exec "$@"'
"""Puts the score pipe where the program expects it. subprocess cannot place a descriptor, and its
preexec_fn is unsafe beside threads; the path also has room for numbers that `>&` has not."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    exit_code: int
    """As a shell reports it."""
    how: Literal["exit", "signal", "oom", "disk", "pids", "timeout", "killed", "not_started"]
    """"killed" is our own doing (a lost race), "signal" anybody else's; "oom", "disk", "pids" and
    "timeout" name the limit that it met and failed for."""
    reason: str
    """The same in words: "exit 1", "killed by SIGSEGV", "no-such: not found"."""
    score: str
    """What it wrote to descriptor 3, or ""."""

    @property
    def success(self) -> bool:
        """It ended by itself, with exit code 0."""
        return self.how == "exit" and self.exit_code == 0


class Command:
    """A program with its arguments and surroundings. `run()` it once; `kill()` from anywhere."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        environment: Mapping[str, str],
        owner: Owner | None = None,
        stdout: Sink = None,
        stderr: Sink = None,
        inherit_stdin: bool = False,
        score: bool = False,
        scope: Scope | None = None,
    ) -> None:
        """`scope` is the control group that the program runs in, from its first instruction on."""
        if not argv:
            raise ValueError("a command needs at least the name of a program")
        self._argv = list(argv)
        self._cwd = cwd
        self._environment = {**environment, **(owner.environment() if owner else {})}
        self._environment["PWD"] = str(cwd)
        self._owner = owner
        self._sinks = {1: stdout, 2: stderr}
        self._inherit_stdin = inherit_stdin
        self._wants_score = score
        self._scope = scope
        self._terminal = Terminal.ours() if inherit_stdin else None

        self._lock = threading.Lock()  # guards the three below
        self._bell: int | None = None
        self._kill_asked_at: float | None = None
        self._kill_grace = 0.0

    def kill(self, grace_seconds: float = 0.0) -> None:
        """Asks for the end: SIGTERM to the group now, SIGKILL after the grace. Does not wait.

        Before `run()` it keeps the program from being started. A second call can shorten the
        grace, not lengthen it. After the end it does nothing.
        """
        with self._lock:
            now = time.monotonic()
            if self._kill_asked_at is None:
                self._kill_asked_at, self._kill_grace = now, grace_seconds
            else:
                remaining = self._kill_asked_at + self._kill_grace - now
                if grace_seconds < remaining:
                    self._kill_asked_at, self._kill_grace = now, grace_seconds
            if self._bell is not None:
                os.eventfd_write(self._bell, 1)

    def run(self) -> Ended:
        """Starts the program, waits for its end and returns how it ended; the group is gone then.

        Raises ForkError when the system could not make the process, ProcessBranchError when it
        did not die within a bound. A program that is not there or not executable is no exception:
        it ends with 127 or 126.
        """
        with _Pipes(self._sinks, self._owner, self._wants_score) as pipes:
            with self._lock:
                if self._kill_asked_at is not None:
                    return _killed("killed before it was started")
                self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            try:
                try:
                    process = self._start(pipes)
                except OSError as error:
                    return self._not_started(error)
                pipes.close_child_ends()
                return self._attend(process, pipes)
            finally:
                with self._lock:
                    os.close(self._bell)
                    self._bell = None

    def _start(self, pipes: _Pipes) -> subprocess.Popen[bytes]:
        argv = self._argv
        if pipes.score is not None:
            argv = ["/bin/sh", "-c", _SCORE_WRAPPER, str(pipes.score), *argv]
        gate = None if self._scope is None else Gate(self._owner)
        try:
            return self._spawn(argv if gate is None else gate.behind(argv), pipes, gate)
        finally:
            if gate is not None:
                gate.close()

    def _spawn(
        self, argv: Sequence[str], pipes: _Pipes, gate: Gate | None
    ) -> subprocess.Popen[bytes]:
        options: dict[str, Any] = {}
        inherited = [] if pipes.score is None else [pipes.score]
        if gate is not None:
            inherited.append(gate.descriptor)
        if self._owner is not None:
            options |= {"user": self._owner.uid, "group": self._owner.gid, "extra_groups": []}
        if self._terminal is not None:
            # A new session would lose the terminal: /dev/tty, password prompts, job control.
            options |= self._terminal.popen_options()
        else:
            options |= {"start_new_session": True}
        process = subprocess.Popen(
            argv,
            cwd=self._cwd,
            env=self._environment,
            stdin=None if self._inherit_stdin else subprocess.DEVNULL,
            stdout=pipes.child_end(1),
            stderr=pipes.child_end(2),
            pass_fds=inherited,
            **options,
        )
        if gate is not None and self._scope is not None:
            try:
                gate.open(process.pid, self._scope)
            except BaseException:
                process.kill()
                process.wait()
                raise
        return process

    def _not_started(self, error: OSError) -> Ended:
        # The name of the program stands in the error only when it was exec that failed.
        if error.filename != self._argv[0] or error.errno in (errno.EAGAIN, errno.ENOMEM):
            raise ForkError(
                f"no process could be made in {self._cwd}: {error.strerror}; nothing ran",
                path=str(self._cwd),
            ) from error
        program = self._argv[0]
        if error.errno == errno.ENOENT:
            code, reason = EXIT_NOT_FOUND, f"{program}: not found (the program or its interpreter)"
        elif error.errno == errno.ENOEXEC:
            code, reason = EXIT_CANNOT_EXECUTE, f"{program}: not a program (no `#!` line?)"
        else:
            code, reason = EXIT_CANNOT_EXECUTE, f"{program}: {error.strerror}"
        return Ended(exit_code=code, how="not_started", reason=reason, score="")

    def _attend(self, process: subprocess.Popen[bytes], pipes: _Pipes) -> Ended:
        """Serves the process until it has ended, then sweeps its group and reaps it."""
        pidfd = os.pidfd_open(process.pid)
        try:
            if self._terminal is not None:
                self._terminal.give(process.pid)
            self._wait(process, pidfd, pipes)
        finally:
            try:
                self._reap(process, pidfd)
            finally:
                os.close(pidfd)
        pipes.drain()
        return self._ended(process.returncode, pipes.score_text())

    def _reap(self, process: subprocess.Popen[bytes], pidfd: int) -> None:
        # Not reaped yet, so the group still is the group of this process.
        _signal_group(process.pid, signal.SIGKILL)
        if self._terminal is not None:
            self._terminal.take_back()
        if not select.select([pidfd], [], [], REAP_SECONDS_MAX)[0]:
            raise ProcessBranchError(
                f"process {process.pid} does not die: it was killed {REAP_SECONDS_MAX:.0f} s ago "
                "and hangs inside the kernel; its branch was not committed",
                hint=f"see /proc/{process.pid}/stack for what it waits for",
            )
        process.wait()
        _await_group(process.pid)

    def _wait(self, process: subprocess.Popen[bytes], pidfd: int, pipes: _Pipes) -> None:
        """Returns when the process has ended, or was sent SIGKILL."""
        assert self._bell is not None, "run() makes the bell before it starts the process"
        poll = select.poll()
        for descriptor in (pidfd, self._bell, *pipes.readable()):
            poll.register(descriptor, select.POLLIN)
        is_terminated = False
        while True:
            kill_in = self._kill_in_seconds()
            if kill_in is not None and not is_terminated:
                _signal_group(process.pid, signal.SIGTERM)
                _signal_group(process.pid, signal.SIGCONT)  # a stopped process hears it too
                is_terminated = True
            if kill_in is not None and kill_in <= 0:
                return
            waits = [seconds for seconds in (kill_in, self._stop_poll()) if seconds is not None]
            ready = {descriptor for descriptor, _ in poll.poll(_milliseconds(waits))}
            for descriptor in pipes.readable():
                if descriptor in ready and not pipes.read(descriptor):
                    poll.unregister(descriptor)
                    pipes.close_readable(descriptor)
            if self._bell in ready:
                os.eventfd_read(self._bell)
            if pidfd in ready:
                return
            if self._terminal is not None:
                self._terminal.follow_stop(process.pid)

    def _kill_in_seconds(self) -> float | None:
        with self._lock:
            if self._kill_asked_at is None:
                return None
            return self._kill_asked_at + self._kill_grace - time.monotonic()

    def _stop_poll(self) -> float | None:
        return STOP_POLL_SECONDS if self._terminal is not None else None

    def _ended(self, returncode: int, score: str) -> Ended:
        if returncode >= 0:
            # A program that took our SIGTERM as a wish and exited in order was killed all the same.
            how: Literal["exit", "killed"] = "exit" if self._kill_asked_at is None else "killed"
            return Ended(exit_code=returncode, how=how, reason=f"exit {returncode}", score=score)
        number = -returncode
        try:
            name = signal.Signals(number).name
        except ValueError:  # the real-time signals have no names
            name = f"signal {number}"
        return Ended(
            exit_code=EXIT_SIGNAL_BASE + number,
            how="signal" if self._kill_asked_at is None else "killed",
            reason=f"killed by {name}",
            score=score,
        )


class _Pipes:
    """The pipes between us and one process: its outputs that a function reads, and its score."""

    def __init__(self, sinks: Mapping[int, Sink], owner: Owner | None, wants_score: bool) -> None:
        self._sinks = sinks
        self._owner = owner
        self._readers: dict[int, Callable[[bytes], None]] = {}
        self._child_ends: dict[int, int] = {}
        self._score = b""
        self.score: int | None = None
        """The child's end of the score pipe."""
        try:
            for number, sink in sinks.items():
                if callable(sink):
                    # One function for both outputs gets one pipe: lines keep their order.
                    shared = number == 2 and sink == sinks[1]
                    self._child_ends[number] = self._child_ends[1] if shared else self._open(sink)
            if wants_score:
                self.score = self._open(self._keep_score)
        except BaseException:
            self.__exit__()
            raise

    def child_end(self, number: int) -> int | None:
        sink = self._sinks[number]
        return self._child_ends[number] if callable(sink) else sink

    def readable(self) -> list[int]:
        return list(self._readers)

    def read(self, descriptor: int) -> bool:
        """Hands on what has arrived. False at the end of the stream."""
        try:
            arrived = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return True
        if arrived:
            self._readers[descriptor](arrived)
        return bool(arrived)

    def drain(self) -> None:
        """Hands on what the ended process left in its pipes."""
        for descriptor, reader in self._readers.items():
            taken = 0
            while taken < _DRAIN_BYTES_MAX:
                try:
                    arrived = os.read(descriptor, _READ_BYTES)
                except BlockingIOError:
                    break
                if not arrived:
                    break
                reader(arrived)
                taken += len(arrived)

    def score_text(self) -> str:
        return self._score.decode("utf-8", "replace").strip()

    def close_readable(self, descriptor: int) -> None:
        del self._readers[descriptor]
        os.close(descriptor)

    def close_child_ends(self) -> None:
        for descriptor in {
            *self._child_ends.values(),
            *([] if self.score is None else [self.score]),
        }:
            os.close(descriptor)
        self._child_ends.clear()
        self.score = None

    def __enter__(self) -> _Pipes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_child_ends()
        for descriptor in self.readable():
            self.close_readable(descriptor)

    def _open(self, reader: Callable[[bytes], None]) -> int:
        ours, childs = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(ours, False)
        self._readers[ours] = reader
        if self._owner is not None:
            # /dev/stdout and /proc/self/fd/N open the pipe anew, as the program's own user.
            os.fchown(childs, self._owner.uid, self._owner.gid)
        return childs

    def _keep_score(self, arrived: bytes) -> None:
        self._score = (self._score + arrived)[-SCORE_BYTES_MAX:]


def _killed(reason: str) -> Ended:
    return Ended(exit_code=EXIT_KILLED, how="killed", reason=reason, score="")


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass  # a command on the terminal may have moved itself to another group
    except PermissionError:
        pass  # every process in it has become another user's (a setuid program): not ours to end


def _await_group(group: int) -> None:
    """Waits until the rest of a group, sent SIGKILL before, has let go of its files.

    Its leader is reaped, yet the number is not given to another group while it has members.
    """
    started = time.monotonic()
    while (waited := time.monotonic() - started) < REAP_SECONDS_MAX:
        try:
            os.killpg(group, 0)
        except (ProcessLookupError, PermissionError):
            return
        if waited > ZOMBIE_CHECK_SECONDS and not _has_living_members(group):
            return
        time.sleep(_GROUP_POLL_SECONDS)


def _has_living_members(group: int) -> bool:
    # Where nobody reaps orphans (a container without an init) a group never gets empty.
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # 77 (a name with any bytes) S parent group ...
            state, _, its_group = stat.read_bytes().rpartition(b")")[2].split()[:3]
        except OSError:
            continue  # it has ended meanwhile
        if int(its_group) == group and state != b"Z":
            return True
    return False


def _milliseconds(waits: list[float]) -> int | None:
    # Rounded up: waking a moment early would turn the last millisecond into a busy loop.
    return int(max(0.0, min(waits)) * 1000) + 1 if waits else None
