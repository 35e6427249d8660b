"""One program, run in a directory until it ends or is killed, with all that it started.

The thread that calls `run()` owns the process: it alone reads its output, signals it and reaps
it, waiting for all of this at one place. Other threads only ring a bell (`kill()`).

The process lives in a sandbox, in which it sees the directory at the workspace's own path and can
leave nothing behind; or, where that was asked for, in the directory itself as a process group.

Exit codes are the shell's: 126 cannot be executed, 127 not found, 128+n killed by signal n.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from branching._exit_codes import EXIT_CANNOT_EXECUTE, EXIT_KILLED, EXIT_NOT_FOUND
from branching._standard_streams import NUMBERS, is_stream, open_closed
from branching.errors import ForkError
from branching.process.cgroup import Cgroup
from branching.process.job_control import JobControl
from branching.process.pipes import Pipes, Sink
from branching.process.process_result import Ended
from branching.process.run_as import Owner
from branching.process.sandbox import Sandbox
from branching.process.sandbox.launcher import LaunchRefused
from branching.process.sandboxed_process import SandboxedProcess
from branching.process.supervisor import Process, Supervisor
from branching.process.unsandboxed import UnsandboxedProcess

if TYPE_CHECKING:
    from branching.process.pty_proxy import PtyProxy

SCORE_FD = 3


class Command:
    """A program with its arguments and surroundings. `run()` it once; `kill()` from anywhere."""

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
        terminal: PtyProxy | None = None,
    ) -> None:
        """`scope` is the control group that the program runs in, from its first instruction on;
        `terminal` is one of its own, which stands for ours. `score` gives it descriptor 3: what it
        writes there is in `Ended.score`, or is handed to the function as it comes.
        """
        if not argv:
            raise ValueError("a command needs at least the name of a program")
        self._argv = list(argv)
        self._cwd = cwd if sandbox is None else sandbox.at
        self._sandbox = sandbox
        self._environment = {**environment, **(owner.environment() if owner else {})}
        self._environment["PWD"] = str(self._cwd)
        self._owner = owner
        self._sinks = {1: stdout, 2: stderr}
        self._inherit_stdin = inherit_stdin
        self._score = score
        self._scope = scope
        self._pty_proxy = terminal
        self._terminal = terminal or (JobControl.ours() if inherit_stdin else None)

        self._supervisor = Supervisor()

    def kill(self, grace_seconds: float = 0.0) -> None:
        """Asks for the end: SIGTERM to all of it now, SIGKILL after the grace. Does not wait.

        Before `run()` it keeps the program from being started. A second call can shorten the
        grace, not lengthen it. After the end it does nothing.
        """
        self._supervisor.kill(grace_seconds)

    def pause(self, *, is_on: bool = True) -> None:
        """Stops all of it (SIGSTOP), or lets it go on. Does not wait; from any thread.

        The clock of a time limit runs on. Not for a command that has the terminal: what stops
        there, stops for the one who sits at it.
        """
        self._supervisor.pause(is_on=is_on)

    def run(self) -> Ended:
        """Starts the program, waits for its end and returns how it ended; all of it is gone then.

        Raises NamespaceError when the sandbox could not be made, ForkError when the system could
        not make the process, ProcessBranchError when it did not die within a bound. A program that
        is not there or not executable is no exception: it ends with 127 or 126.
        """
        started = time.monotonic()
        open_closed()
        with ExitStack() as stack:
            pipes = stack.enter_context(Pipes(self._sinks, self._owner, self._score))
            stack.enter_context(self._supervisor)
            if self._pty_proxy is not None:
                stack.enter_context(self._pty_proxy.lent())
            if self._supervisor.is_kill_asked:
                reason = "killed before it was started"
                return Ended(exit_code=EXIT_KILLED, how="cancelled", reason=reason)
            process = self._start(pipes)
            if isinstance(process, Ended):
                return process
            if self._pty_proxy is not None:
                self._pty_proxy.begin()
            pipes.close_child_ends()
            try:
                self._supervisor.supervise(process, pipes)
            finally:
                end = process.finish()
            pipes.drain()
            return end.told(
                is_cancelled=self._supervisor.is_kill_asked,
                score=pipes.score_text(),
                wall_seconds=time.monotonic() - started,
            )

    def _start(self, pipes: Pipes) -> Process | Ended:
        if self._sandbox is not None:
            return self._start_sandboxed(self._sandbox, pipes)
        if self._scope is not None or self._pty_proxy is not None:
            # It must be held at a gate until the limits are on it, or led by another on a terminal.
            return self._start_sandboxed(Sandbox.of(self._cwd, at=self._cwd), pipes)
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
            # The name of the program stands in the error only when it was exec that failed.
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
