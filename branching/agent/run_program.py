"""Runs a program in a branch's directory and awaits its end.

The program gets the sandbox and environment of every command in a branch. It sees the branch at the
workspace's path and has its own ports and TMPDIR. At its end all its processes are killed. Each
program has its own thread, so any number of branches can run programs concurrently.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from branching._threads import run_in_thread
from branching.process import OWN_TMP, Command, Ended, Isolation, Owner, Sandbox, Sink
from branching.process.port_ranges import reserve_ports


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Where a program works."""

    directory: Path
    """The branch's."""
    seen_at: Path | None = None
    """The path at which it sees the directory. Default: the mount's root for a branch, else the
    directory's own path."""
    isolation: Isolation = "sandbox"
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables to add to this process's environment."""
    beside: tuple[tuple[Path, Path], ...] = ()
    """Other directories that it sees, read-only, each with the place where."""


def words(command: str | Sequence[str]) -> list[str]:
    """Returns the argv: a string is for the shell."""
    return ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)


async def run_program(
    command: str | Sequence[str],
    place: RunSettings,
    *,
    stdout: Sink,
    stderr: Sink,
    timeout: float | None = None,
    reports: Callable[[bytes], None] | None = None,
    on_command: Callable[[Command], None] | None = None,
) -> Ended:
    """Runs a program, or a shell command given as a string, to its end.

    `reports` receives the bytes written to descriptor 3, in another thread. `on_command` receives
    the command before it starts. After a cancellation, the program is killed before
    CancelledError is raised. A program that does not exist ends with exit code 127.

    Raises:
        NamespaceError: The sandbox could not be created.
        ForkError: The program could not be started.
    """
    run = _Run(words(command), place, stdout, stderr, timeout, reports, on_command)
    return await run_in_thread(run, on_cancel=lambda _: run.kill())


class _Run:
    """The part that a thread does."""

    def __init__(
        self,
        argv: list[str],
        place: RunSettings,
        stdout: Sink,
        stderr: Sink,
        timeout: float | None,
        reports: Callable[[bytes], None] | None,
        on_command: Callable[[Command], None] | None,
    ) -> None:
        self._argv = argv
        self._place = place
        self._sinks = {"stdout": stdout, "stderr": stderr}
        self._timeout = timeout
        self._reports = reports
        self._on_command = on_command
        self._lock = threading.Lock()  # guards the next two
        self._is_killed = False
        self._command: Command | None = None

    def kill(self) -> None:
        with self._lock:
            self._is_killed = True
            if self._command is not None:
                self._command.kill()

    def __call__(self) -> Ended:
        place = self._place
        directory = Path(os.path.realpath(place.directory))
        with ExitStack() as stack:
            about = directory.stat()
            owner = stack.enter_context(Owner.of(about.st_uid, about.st_gid))
            sandbox = None
            if place.isolation == "sandbox":
                home = Owner.home_of(owner)
                sandbox = Sandbox.of(directory, at=place.seen_at, home=home, beside=place.beside)
            environment = {
                **os.environ,
                "BRANCHING": "1",
                "BRANCHING_WORKSPACE": str(directory if sandbox is None else sandbox.at),
                "BRANCHING_PORT_BASE": str(stack.enter_context(reserve_ports())),
                **({} if sandbox is None else {"TMPDIR": str(OWN_TMP)}),
                **place.environment,
            }
            command = Command(
                self._argv,
                cwd=directory,
                sandbox=sandbox,
                environment=environment,
                owner=owner,
                score=self._reports or False,
                wall_seconds=self._timeout,
                **self._sinks,  # type: ignore[arg-type]
            )
            if self._on_command is not None:
                self._on_command(command)
            with self._lock:
                self._command = command
                if self._is_killed:
                    command.kill()
            return command.run()
