"""Controls running candidates: pause, resume, stop, keep, and send a message.

A context variable passes the RunController to the code of a call, as for `CancelScope`. Code that
runs a process for a candidate registers it (`controlling`). A caller in the same program, or a
client of the control socket, refers to it by branch. Only processes can be controlled: a function
runs in this program and cannot be stopped. All methods are safe to call from any thread.

A message is appended to a message file. The candidate's environment variable BRANCHING_STEER has
its path, and a program that accepts messages reads it. It cannot be detected whether a program
does.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from branching.errors import BranchError

if TYPE_CHECKING:
    from branching.fs import Branch

WORDS_BYTES_MAX = 1 << 20
"""Maximum size of a message file. Messages are typed by a person and are not a data channel."""
STOP_GRACE_SECONDS = 1.0
"""Time between SIGTERM and SIGKILL when a user stops a candidate."""

_current: contextvars.ContextVar[RunController | None] = contextvars.ContextVar(
    "helm", default=None
)


class Controllable(Protocol):
    """A process that runs for a candidate."""

    def kill(self, grace_seconds: float = 0.0) -> None:
        """Sends SIGTERM, and SIGKILL after the grace period. Does not wait."""

    def pause(self, *, is_on: bool = True) -> None:
        """Pauses the process (SIGSTOP), or resumes it."""


class _Controlled(NamedTuple):
    process: Controllable
    words: Path | None
    tell: Callable[[str], None] | None


class RunController:
    """The run controller of one call.

    `on_state` is called with a branch name and "paused" or "running" when the state changes.
    `before_end` is called with each branch before it is committed or dropped.
    """

    def __init__(
        self,
        on_state: Callable[[str, str], None] = lambda _branch, _state: None,
        before_end: Callable[[Branch], None] = lambda _branch: None,
    ) -> None:
        self._on_state = on_state
        self.before_end = before_end
        self.directory: Path | None = None
        """Directory for message files; None creates none."""
        self._lock = threading.Lock()  # guards all below
        self._running: dict[str, list[_Controlled]] = {}
        self._kept: set[str] = set()
        self._stopped: set[str] = set()
        self._called: dict[str, str] = {}

    @staticmethod
    def current() -> RunController | None:
        """Returns the run controller of the call that the calling code belongs to."""
        return _current.get()

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Returns a context in which this is the current run controller."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def call(self, name: str, branch: str) -> None:
        """Makes the processes of `branch` controllable under another name, that of its log."""
        with self._lock:
            self._called[name] = branch

    @contextmanager
    def steer_file(self, branch: str) -> Iterator[Path | None]:
        """Creates an empty message file for the duration of the `with`.

        It is the only file in its directory, so that a sandbox can mount the directory. Yields
        None if there is no directory for message files.
        """
        if self.directory is None:
            yield None
            return
        own = self.directory / f"{branch}-{os.urandom(4).hex()}"
        own.mkdir(0o700)
        try:
            words = own / "steer"
            words.touch()
            # The command may run as another user and must be able to read the file.
            own.chmod(0o755)
            words.chmod(0o644)
            yield words
        finally:
            import shutil

            shutil.rmtree(own, ignore_errors=True)

    @contextmanager
    def controlling(
        self,
        branch: str,
        process: Controllable,
        words: Path | None,
        *,
        tell: Callable[[str], None] | None = None,
    ) -> Iterator[None]:
        """Registers a process for the duration of the `with`.

        Messages are appended to `words`, its message file, and passed to `tell`.
        """
        controlled = _Controlled(process, words, tell)
        with self._lock:
            self._running.setdefault(branch, []).append(controlled)
        try:
            yield
        finally:
            with self._lock:
                self._running[branch].remove(controlled)

    def pause(self, branch: str, *, is_on: bool = True) -> None:
        """Pauses all processes of a branch (SIGSTOP), or resumes them.

        The time limit of the call is not paused.

        Raises:
            BranchError: No process of the branch can be controlled.
        """
        for controlled in self._of(branch):
            controlled.process.pause(is_on=is_on)
        self._on_state(branch, "paused" if is_on else "running")

    def stop(self, branch: str) -> None:
        """Stops the processes of a branch. The candidate fails, and the call continues without it.

        Returns immediately. The run log shows the candidate as cancelled.

        Raises:
            BranchError: No process of the branch can be controlled.
        """
        running = self._of(branch)
        with self._lock:
            self._stopped.add(branch)
        for controlled in running:
            controlled.process.kill(STOP_GRACE_SECONDS)

    def is_stopped(self, branch: str) -> bool:
        """Returns whether a user stopped the candidate in this branch."""
        with self._lock:
            return branch in self._stopped

    def tell(self, branch: str, text: str) -> None:
        """Sends a message to the processes of a branch.

        Raises:
            BranchError: No process of the branch accepts messages, or its message file is full.
        """
        found = self._of(branch)
        files = [controlled.words for controlled in found if controlled.words is not None]
        tellers = [controlled.tell for controlled in found if controlled.tell is not None]
        for tell in tellers:
            tell(text)
        if not files and not tellers:
            raise BranchError(
                (
                    f"cannot send a message to branch {branch!r}: its command was started without "
                    "a message file"
                ),
                branch=branch,
            )
        for file in files:
            append_message(file, branch, text)

    def keep(self, branch: str) -> None:
        """Leaves a branch open after the call, unless it is committed as the winner's.

        Under the policy first-winner it becomes stale when another branch is committed.
        """
        with self._lock:
            self._kept.add(branch)

    def keeps(self, branch: str) -> bool:
        """Returns whether a user requested to keep this branch."""
        with self._lock:
            return branch in self._kept

    def _of(self, branch: str) -> list[_Controlled]:
        with self._lock:
            found = list(self._running.get(self._called.get(branch, branch), ()))
        if not found:
            raise BranchError(
                f"the candidate of branch {branch!r} cannot be controlled: it has ended, has not "
                "started, or is a function in the calling program",
                branch=branch,
            )
        return found


def append_message(file: Path, branch: str, text: str) -> None:
    """Appends a message to a message file as one line.

    Raises:
        BranchError: The file would become larger than WORDS_BYTES_MAX.
    """
    line = (" ".join(text.split()) + "\n").encode("utf-8", "replace")
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size + len(line) > WORDS_BYTES_MAX:
            raise BranchError(
                (
                    f"cannot send a message to branch {branch!r}: its message file has "
                    f"{WORDS_BYTES_MAX} bytes already"
                ),
                branch=branch,
            )
        os.write(descriptor, line)
    finally:
        os.close(descriptor)
