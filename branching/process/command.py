"""Runs one program in a directory until it ends or is killed, with all its descendants.

Only the thread that calls `run()` reads the output of the process, forwards it, signals the process
and reaps it. It waits for all of these events in one place. `kill()` and `pause()`, called by other
threads or by signal handlers, only wake it.

The process runs in a sandbox, in which it sees the directory at the workspace's own path and from
which no process survives. Without a sandbox it runs in the directory itself, as a process group.

Exit codes are those of a shell: 126 not executable, 127 not found, 128+n killed by signal n.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from branching._exit_codes import EXIT_CANNOT_EXECUTE, EXIT_KILLED, EXIT_NOT_FOUND
from branching._standard_streams import NUMBERS, is_stream, open_closed
from branching.errors import ForkError
from branching.process.job_control import JobControl
from branching.process.pipes import Pipes, Sink
from branching.process.process_result import Ended, ended_by
from branching.process.run_as import Owner
from branching.process.sandbox import Sandbox
from branching.process.sandbox.launcher import LaunchRefused
from branching.process.sandboxed_process import SandboxedProcess
from branching.process.supervisor import Process, Supervisor

if TYPE_CHECKING:
    from branching.process.cgroup import Cgroup
    from branching.process.pty_proxy import PtyProxy

SCORE_FD = 3
TIMEOUT_GRACE_SECONDS = 1.0
"""Time between SIGTERM and SIGKILL when the time limit of a command expires."""


class Command:
    """A program with its arguments and environment. Call `run()` once, `kill()` from any thread."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        environment: Mapping[str, str],
        sandbox: Sandbox | None = None,
        owner: Owner | None = None,
        stdout: Sink = None,
        stderr: Sink = None,
        inherit_stdin: bool = False,
        score: bool | Callable[[bytes], None] = False,
        scope: Cgroup | None = None,
        wall_seconds: float | None = None,
        deadline: float = math.inf,
        disk_refusals: Callable[[], int] = lambda: 0,
        terminal: PtyProxy | None = None,
        on_readable: Mapping[int, Callable[[], None]] | None = None,
    ) -> None:
        """Prepares the command. Nothing is started.

        Args:
            argv: The program and its arguments.
            cwd: Working directory. In a sandbox it is the sandbox's path of the workspace instead.
            environment: The complete environment.
            sandbox: The sandbox; None runs the program without one.
            owner: The user to run it as. Default: the user of this process.
            stdout: A descriptor, a function that is called with the output, or a descriptor to
                forward it to.
            stderr: The same for standard error.
            inherit_stdin: Give the program the standard input and the terminal of this process.
            score: Open descriptor 3 in the program. Its data goes to `Ended.score`, or to this
                function as it arrives.
            scope: The control group in which the program runs from its first instruction. It is
                removed when the program has ended.
            wall_seconds: Time after which it is ended, with `TIMEOUT_GRACE_SECONDS` between SIGTERM
                and SIGKILL. Default: no limit.
            deadline: Time (time.monotonic) at which it is killed as by `kill`, with the same grace.
            disk_refusals: Returns how many changes the disk limit has refused since the start.
            terminal: A separate terminal for the program, connected to that of this process.
            on_readable: While the program runs: functions that are called once, when the descriptor
                is readable.

        Raises:
            ValueError: `argv` is empty.
        """
        if not argv:
            raise ValueError("a command needs at least the name of a program")
        self._argv = list(argv)
        self._cwd = cwd if sandbox is None else sandbox.at
        self._sandbox = sandbox
        self._environment = {**environment, **(owner.environment() if owner else {})}
        directory = "" if sandbox is None else sandbox.directory or ""
        self._environment["PWD"] = str(self._cwd / directory)
        self._owner = owner
        self._sinks = {1: stdout, 2: stderr}
        self._inherit_stdin = inherit_stdin
        self._score = score
        self._scope = scope
        self._wall_seconds = wall_seconds
        self._deadline = deadline
        self._on_readable = dict(on_readable or {})
        self._disk_refusals = disk_refusals
        self._pty_proxy = terminal
        self._terminal = terminal or (JobControl.ours() if inherit_stdin else None)

        self._supervisor = Supervisor()

    def kill(self, grace_seconds: float = 0.0) -> None:
        """Sends SIGTERM to all processes of the command, and SIGKILL later. Does not wait.

        Before `run()` it prevents the start of the program. A second call can shorten the grace
        period, but not extend it. After the end it does nothing.

        Args:
            grace_seconds: Time between SIGTERM and SIGKILL.
        """
        self._supervisor.kill(grace_seconds)

    def pause(self, *, is_on: bool = True) -> None:
        """Pauses all processes of the command (SIGSTOP), or resumes them. Does not wait.

        Safe to call from any thread. A time limit is not paused. Do not use it on a command that
        is attached to the terminal: job control would stop the user's shell job.

        Args:
            is_on: False resumes.
        """
        self._supervisor.pause(is_on=is_on)

    def run(self) -> Ended:
        """Starts the program and waits for its end. No process of it is left when this returns.

        A missing or non-executable program does not raise an exception: the command ends with exit
        code 127 or 126.

        Returns:
            How the program ended.

        Raises:
            NamespaceError: The sandbox could not be created.
            ForkError: The process could not be created.
            ProcessBranchError: The process did not die within a bounded time after SIGKILL, or its
                output could not be forwarded.
        """
        started = time.monotonic()
        open_closed()
        with ExitStack() as stack:
            pipes = stack.enter_context(Pipes(self._sinks, self._owner, self._score))
            stack.enter_context(self._supervisor)
            if self._pty_proxy is not None:
                stack.enter_context(self._pty_proxy.forwarding())
            if self._supervisor.is_kill_asked:
                reason = "killed before it was started"
                return Ended(exit_code=EXIT_KILLED, how="cancelled", reason=reason)
            process = self._start(pipes)
            if isinstance(process, Ended):
                return process
            if self._pty_proxy is not None:
                self._pty_proxy.begin()
            pipes.close_child_ends()
            is_cancelled = timed_out = False
            try:
                has_ended = self._supervisor.supervise(
                    process, pipes, self._remaining_seconds(started), self._on_readable
                )
                is_cancelled = self._supervisor.is_kill_asked
                if not has_ended:
                    is_cancelled = is_cancelled or time.monotonic() >= self._deadline
                    timed_out = not is_cancelled
                    self._supervisor.kill(TIMEOUT_GRACE_SECONDS)
                    self._supervisor.supervise(process, pipes)
            finally:
                status = process.finish()
            self._supervisor.deliver(pipes)
            pipes.finish()
            if self._scope is not None:
                self._scope.remove()
            return ended_by(
                status._replace(timed_out=timed_out),
                is_cancelled=is_cancelled,
                score=pipes.score_text(),
                wall_seconds=time.monotonic() - started,
                usage=None if self._scope is None else self._scope.usage(),
                disk_refusals=self._disk_refusals(),
            )

    def _remaining_seconds(self, started: float) -> float | None:
        until = self._deadline
        if self._wall_seconds is not None:
            until = min(until, started + self._wall_seconds)
        return None if until == math.inf else max(0.0, until - time.monotonic())

    def _start(self, pipes: Pipes) -> Process | Ended:
        if self._sandbox is not None:
            return self._start_sandboxed(self._sandbox, pipes)
        if self._scope is not None or self._pty_proxy is not None:
            # Its start must wait until its limits apply, or another process must lead its session.
            return self._start_sandboxed(Sandbox.of(self._cwd, at=self._cwd), pipes)
        from branching.process.unsandboxed import UnsandboxedProcess

        try:
            return UnsandboxedProcess(
                self._argv,
                cwd=self._cwd,
                environment=self._environment,
                owner=self._owner,
                pipes=pipes,
                inherit_stdin=self._inherit_stdin,
                terminal=JobControl.ours() if self._inherit_stdin else None,
            )
        except OSError as error:
            # The error contains the name of the program only if exec failed.
            if error.filename != self._argv[0] or error.errno in (errno.EAGAIN, errno.ENOMEM):
                raise ForkError(
                    f"no process could be made in {self._cwd}: {error.strerror}; nothing ran",
                    path=str(self._cwd),
                ) from error
            return self._not_started(error)

    def _start_sandboxed(self, sandbox: Sandbox, pipes: Pipes) -> SandboxedProcess | Ended:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        own = {number: number if is_stream(number) else nothing for number in NUMBERS}
        descriptors = {0: own[0] if self._inherit_stdin else nothing}
        if self._pty_proxy is not None and self._pty_proxy.takes_keys:
            descriptors[0] = self._pty_proxy.slave
        for number in (1, 2):
            end = pipes.child_end(number)
            descriptors[number] = own[number] if end is None else end
        if pipes.score is not None:
            descriptors[SCORE_FD] = pipes.score
        try:
            return SandboxedProcess(
                sandbox,
                isolation="none" if self._sandbox is None else "sandbox",
                argv=self._argv,
                environment=self._environment,
                owner=self._owner,
                descriptors=descriptors,
                terminal=self._terminal,
                admit=None if self._scope is None else self._scope.add,
            )
        except LaunchRefused as refused:
            return self._not_started(refused)
        finally:
            os.close(nothing)

    def _not_started(self, error: OSError | LaunchRefused) -> Ended:
        program = self._argv[0]
        if error.errno == errno.ENOENT:
            code, reason = EXIT_NOT_FOUND, f"{program}: not found (the program or its interpreter)"
        elif error.errno == errno.ENOEXEC:
            code, reason = EXIT_CANNOT_EXECUTE, f"{program}: not a program (no `#!` line?)"
        else:
            code, reason = EXIT_CANNOT_EXECUTE, f"{program}: {error.strerror}"
        return Ended(exit_code=code, how="error", reason=reason)
