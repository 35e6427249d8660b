"""One program, run in a branch's directory and awaited.

The program gets the sandbox and the surroundings of every command in a branch: it sees the branch
at the workspace's own path, has ports and a TMPDIR of its own, and is gone with all it started
when it ends. Each runs in a thread of its own, so any number of branches may run theirs at once.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from branching.process import OWN_TMP, Command, Ended, Isolation, Owner, Sandbox, Sink
from branching.process.port_ranges import reserve_ports

TIMEOUT_GRACE_SECONDS = 1.0
"""Between SIGTERM and SIGKILL when the time of a program is over."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Where a program works."""

    directory: Path
    """The branch's."""
    seen_at: Path | None = None
    """The path at which it sees the directory; by default the mount's root, and a directory that
    is no branch at its own path."""
    isolation: Isolation = "sandbox"
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to ours."""
    beside: tuple[tuple[Path, Path], ...] = ()
    """Other directories that it sees, read-only, each with the place where."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """A program that has ended."""

    ended: Ended
    timed_out: bool


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
) -> Done:
    """Runs a program to its end; a string is a shell's. Functions are called in another thread.

    `reports` is handed what it writes to descriptor 3; `on_command` gets the command before it is
    started, to steer it. Cancelled, it kills the program and goes on when that is gone. Raises
    NamespaceError or ForkError when nothing could be run; a program that is not there ends with
    127.
    """
    run = _Run(words(command), place, stdout, stderr, timeout, reports, on_command)
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Done] = loop.create_future()

    def work() -> None:
        try:
            result = run()
        except BaseException as error:  # raised again in the task
            _tell(loop, done.set_exception, error)
        else:
            _tell(loop, done.set_result, result)

    threading.Thread(target=work, name="branching program", daemon=True).start()
    cancelled: asyncio.CancelledError | None = None
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError as asked:
            cancelled = asked
            run.kill()
    if cancelled is not None:
        done.exception()  # seen: the cancellation is what the caller asked for
        raise cancelled
    return done.result()


def _tell(loop: asyncio.AbstractEventLoop, step: Callable[..., None], value: object) -> None:
    try:
        loop.call_soon_threadsafe(step, value)
    except RuntimeError:
        pass  # the loop is closed: nobody waits any more


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

    def __call__(self) -> Done:
        place = self._place
        directory = Path(os.path.realpath(place.directory))
        is_over = threading.Event()
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
                **self._sinks,  # type: ignore[arg-type]
            )
            if self._on_command is not None:
                self._on_command(command)
            with self._lock:
                self._command = command
                if self._is_killed:
                    command.kill()
            if self._timeout is not None:
                stack.enter_context(_alarm(self._timeout, command, is_over))
            return Done(ended=command.run(), timed_out=is_over.is_set())


def _alarm(seconds: float, command: Command, is_over: threading.Event) -> ExitStack:
    def ring() -> None:
        is_over.set()
        command.kill(TIMEOUT_GRACE_SECONDS)

    timer = threading.Timer(seconds, ring)
    timer.daemon = True
    timer.start()
    stack = ExitStack()
    stack.callback(timer.cancel)
    return stack
