"""A process in a sandbox, with the same face as one without (`unsandboxed`)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from branching.errors import ProcessBranchError
from branching.process.process_result import REAP_SECONDS_MAX, ExitStatus
from branching.process.run_as import Owner
from branching.process.sandbox import Isolation, Sandbox, launcher
from branching.process.sandbox.launch_request import Request
from branching.process.sandbox.parent_state import ParentState

if TYPE_CHECKING:
    from branching.process.job_control import JobControl
    from branching.process.pty_proxy import PtyProxy


class SandboxedProcess:
    """A running program, or function. `finish()` ends it in any case, with all it started."""

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        environment: Mapping[str, str],
        owner: Owner | None,
        descriptors: Mapping[int, int],
        isolation: Isolation = "sandbox",
        argv: Sequence[str] = (),
        terminal: JobControl | PtyProxy | None = None,
        admit: Callable[[int], None] | None = None,
        wall_seconds: float | None = None,
        call: bytes = b"",
        result: int = -1,
        path: Sequence[str] = (),
        preload: Sequence[str] = (),
        mounter: int = -1,
    ) -> None:
        self._terminal = terminal
        caller = ParentState.read()
        request = Request(
            sandbox=sandbox,
            owner=None if owner is None else (owner.uid, owner.gid),
            user=(os.geteuid(), os.getegid()),
            is_sandboxed=isolation == "sandbox",
            is_user_namespace=isolation == "sandbox" and not caller.is_privileged,
            is_limited=admit is not None,
            environment=dict(environment),
            numbers=tuple(descriptors),
            ignored_signals=caller.ignored_signals,
            umask=caller.umask,
            terminal=None if terminal is None else terminal.number,
            is_terminal_own=terminal is not None and terminal.is_own,
            wall_seconds=wall_seconds,
            argv=tuple(argv),
            call=call,
            result=result,
            path=tuple(path),
            preload=tuple(preload),
            mounter=mounter,
        )
        try:
            self._started = launcher.start(request, list(descriptors.values()), admit)
        except BaseException:
            if terminal is not None:
                terminal.take_back()  # it may have been in front already
            raise
        self.pid = self._started.pid
        self.end = self._started.end
        self._is_told_all = False

    def waits_on(self) -> list[int]:
        """Returns the descriptors whose events `handle_events` handles."""
        return [] if self._is_told_all else [self._started.fileno()]

    def poll_seconds(self) -> float | None:
        """Returns the polling interval of `handle_events` in seconds, None without polling."""
        return None

    def handle_events(self) -> None:
        """Handles the events of `waits_on` other than the end."""
        self._is_told_all = self._is_told_all or not self._started.read()
        if self._started.is_stopped:
            self._started.is_stopped = False
            if self._terminal is not None:
                self._terminal.stop_along(self.pid)
                self._started.resume()

    def terminate(self) -> None:
        """Sends SIGTERM to all its processes."""
        self._started.terminate()

    def pause(self) -> None:
        """Sends SIGSTOP to all its processes."""
        self._started.pause()

    def resume(self) -> None:
        """Sends SIGCONT to all its processes."""
        self._started.resume()

    def kill(self) -> None:
        """Sends SIGKILL to all its processes. Does not wait."""
        self._started.kill()

    def has_ended(self) -> bool:
        """Whether all its processes are dead."""
        return self._started.await_end(0)

    def finish(self) -> ExitStatus:
        """Kills the remaining processes, waits for their end, and returns how the process ended."""
        try:
            if not self.has_ended():
                self._started.kill()
            if self._terminal is not None:
                self._terminal.take_back()
            if not self._started.await_end(REAP_SECONDS_MAX):
                raise ProcessBranchError(
                    f"process {self.pid} does not die: it was killed {REAP_SECONDS_MAX:.0f} s ago "
                    "and hangs inside the kernel, or one of its children does; its branch was not "
                    "committed",
                    hint=f"see /proc/{self.pid}/stack for what it waits for",
                )
            while not self._is_told_all and self._started.read():
                if self._started.report:
                    break
        finally:
            self._started.close()
        told = self._started.report
        if not told:
            return ExitStatus(returncode=-signal.SIGKILL)
        return ExitStatus(
            returncode=os.waitstatus_to_exitcode(told["status"]),
            cpu_seconds=told["cpu"],
            memory_peak=told["peak"],
            timed_out=told["timed_out"],
            is_uncovered=told["is_uncovered"],
        )
