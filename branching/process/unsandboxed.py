"""A process without a sandbox: a program in its own session and process group.

The process is the leader of its group and is reaped last. Until then the kernel does not reuse its
pid for another group, so a signal never reaches an unrelated process. When it ends, the remaining
processes of its group are killed. Processes that leave the group (daemons with their own session)
are not killed; that requires a sandbox.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from branching.errors import ProcessBranchError
from branching.process.job_control import JobControl
from branching.process.pipes import Pipes
from branching.process.process_result import REAP_SECONDS_MAX, ExitStatus
from branching.process.run_as import Owner

ZOMBIE_CHECK_SECONDS = 0.003
"""Killed processes die sooner. From then on the process table is read, which costs as long."""
STOP_POLL_SECONDS = 0.1
"""How often a command on the terminal is asked whether Ctrl-Z stopped it."""

_GROUP_POLL_SECONDS = 0.0005
_SCORE_FD = 3
_SCORE_WRAPPER = f'exec {_SCORE_FD}>"/proc/self/fd/$0"; exec "$@"'
"""Puts the score pipe where the program expects it. subprocess cannot place a descriptor, and its
preexec_fn is unsafe beside threads; the path also has room for numbers that `>&` has not."""


class UnsandboxedProcess:
    """A running program. `finish()` ends and reaps it in any case."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        environment: Mapping[str, str],
        owner: Owner | None,
        pipes: Pipes,
        inherit_stdin: bool,
        terminal: JobControl | None,
    ) -> None:
        words = list(argv)
        if pipes.score is not None:
            words = ["/bin/sh", "-c", _SCORE_WRAPPER, str(pipes.score), *argv]
        options: dict[str, Any] = {}
        if owner is not None:
            options |= {"user": owner.uid, "group": owner.gid, "extra_groups": []}
        if terminal is not None:
            # A new session would lose the terminal: /dev/tty, password prompts, job control.
            options |= terminal.popen_options()
        else:
            options |= {"start_new_session": True}
        self._terminal = terminal
        self._process = subprocess.Popen(
            words,
            cwd=cwd,
            env=environment,
            stdin=None if inherit_stdin else subprocess.DEVNULL,
            stdout=pipes.child_end(1),
            stderr=pipes.child_end(2),
            pass_fds=() if pipes.score is None else (pipes.score,),
            **options,
        )
        self.pid = self._process.pid
        self.end = os.pidfd_open(self.pid)
        if terminal is not None:
            terminal.give(self.pid)

    def waits_on(self) -> list[int]:
        """Returns the descriptors that `handle_events` has to do with."""
        return []

    def poll_seconds(self) -> float | None:
        """The polling interval of `handle_events` in seconds, None if no polling is needed."""
        return STOP_POLL_SECONDS if self._terminal is not None else None

    def handle_events(self) -> None:
        """Handles events other than the end of the process."""
        if self._terminal is not None:
            self._terminal.follow_stop(self.pid)

    def terminate(self) -> None:
        """Sends SIGTERM to the group."""
        _signal_group(self.pid, signal.SIGTERM)
        _signal_group(self.pid, signal.SIGCONT)  # a stopped process hears it too

    def pause(self) -> None:
        """Sends SIGSTOP to the group."""
        _signal_group(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Sends SIGCONT to the group."""
        _signal_group(self.pid, signal.SIGCONT)

    def finish(self) -> ExitStatus:
        """Kills the remaining processes, waits until they have ended, and returns the result."""
        try:
            # Not reaped yet, so the group still is the group of this process.
            _signal_group(self.pid, signal.SIGKILL)
            if self._terminal is not None:
                self._terminal.take_back()
            if not select.select([self.end], [], [], REAP_SECONDS_MAX)[0]:
                raise ProcessBranchError(
                    f"process {self.pid} does not die: it was killed {REAP_SECONDS_MAX:.0f} s ago "
                    "and hangs inside the kernel; its branch was not committed",
                    hint=f"see /proc/{self.pid}/stack for what it waits for",
                )
            _, status, used = os.wait4(self.pid, 0)
            self._process.returncode = os.waitstatus_to_exitcode(status)
            _await_group(self.pid)
        finally:
            os.close(self.end)
        return ExitStatus(
            returncode=self._process.returncode,
            cpu_seconds=used.ru_utime + used.ru_stime,
            memory_peak=used.ru_maxrss * 1024,
        )


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass  # a command on the terminal may have moved itself to another group
    except PermissionError:
        pass  # all its processes belong to another user (setuid): they cannot be killed


def _await_group(group: int) -> None:
    """Waits until the killed processes of a group have ended and closed their files.

    The leader is reaped, but the kernel does not reuse the id while the group has members.
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
    # In a container without an init, orphans are not reaped, and the group never gets empty.
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # 77 (a name with any bytes) S parent group ...
            state, _, its_group = stat.read_bytes().rpartition(b")")[2].split()[:3]
        except OSError:
            continue  # it has ended meanwhile
        if int(its_group) == group and state != b"Z":
            return True
    return False
