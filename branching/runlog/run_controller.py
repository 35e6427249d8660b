"""What a person can tell the candidates of a call while they run: pause, go on, stop, keep, a word.

A RunController is carried to the code it governs by a context variable, as a `CancelScope` is. Who
runs a process for a candidate registers it (`controlling`); a caller in the same program, or at the
other end of a socket (`control_socket`), names a branch. Only processes can be controlled: a
function is called in this program, and nothing can stop it. Everything here may be called from any
thread.

A message is appended to a file, the steer file: the environment of the candidate names it in
BRANCHING_STEER, and a program that takes messages reads it when it likes. Whether a program does
cannot be known.
"""

from __future__ import annotations

import contextvars
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from branching.errors import BranchError

if TYPE_CHECKING:
    from branching.fs import Branch

WORDS_BYTES_MAX = 1 << 20
"""Of all that one process is told. It is a person's typing, not a channel for data."""
STOP_GRACE_SECONDS = 1.0
"""Between SIGTERM and SIGKILL of what is stopped by hand."""

_current: contextvars.ContextVar[RunController | None] = contextvars.ContextVar(
    "helm", default=None
)


class Controllable(Protocol):
    """A process that runs for a candidate."""

    def kill(self, grace_seconds: float = 0.0) -> None:
        """Asks for its end."""

    def pause(self, *, is_on: bool = True) -> None:
        """Stops it, or lets it go on."""


@dataclass(frozen=True, eq=False)
class _Controlled:
    process: Controllable
    words: Path | None
    tell: Callable[[str], None] | None


class RunController:
    """One call's. `on_state` is told the branch and "paused" or "running" when that changes;
    `before_end` receives each branch that is about to be committed or dropped."""

    def __init__(
        self,
        on_state: Callable[[str, str], None] = lambda _branch, _state: None,
        before_end: Callable[[Branch], None] = lambda _branch: None,
    ) -> None:
        self._on_state = on_state
        self.before_end = before_end
        self.directory: Path | None = None
        """Where steer files are made; without it there are none."""
        self._lock = threading.Lock()  # guards all below
        self._running: dict[str, list[_Controlled]] = {}
        self._kept: set[str] = set()
        self._stopped: set[str] = set()
        self._called: dict[str, str] = {}

    @staticmethod
    def current() -> RunController | None:
        """Returns the helm of the call that the calling code belongs to."""
        return _current.get()

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Puts what is called inside the `with` under this helm."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def call(self, name: str, branch: str) -> None:
        """Has what runs in a branch be steered by another name, that of its log."""
        with self._lock:
            self._called[name] = branch

    @contextmanager
    def steer_file(self, branch: str) -> Iterator[Path | None]:
        """Makes an empty steer file, alone in a directory that a sandbox can show, and removes both
        after. None where there is no place for it."""
        if self.directory is None:
            yield None
            return
        own = Path(tempfile.mkdtemp(prefix=f"{branch}-", dir=self.directory))
        try:
            words = own / "steer"
            words.touch()
            # It is ours, and the branch's command, often another user, only reads it.
            own.chmod(0o755)
            words.chmod(0o644)
            yield words
        finally:
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
        """Lets a process be steered for the length of the `with`. What is said to it is written to
        `words`, its steer file, or handed to `tell`."""
        controlled = _Controlled(process, words, tell)
        with self._lock:
            self._running.setdefault(branch, []).append(controlled)
        try:
            yield
        finally:
            with self._lock:
                self._running[branch].remove(controlled)

    def pause(self, branch: str, *, is_on: bool = True) -> None:
        """Stops all processes of a branch (SIGSTOP), or lets them go on.

        The time limit of the call runs on. BranchError if none of its processes can be steered.
        """
        for controlled in self._of(branch):
            controlled.process.pause(is_on=is_on)
        self._on_state(branch, "paused" if is_on else "running")

    def stop(self, branch: str) -> None:
        """Ends what runs in a branch: the candidate has failed, and the call goes on without it.

        The log says that it was cancelled. Returns immediately. BranchError if none of its
        processes can be steered.
        """
        running = self._of(branch)
        with self._lock:
            self._stopped.add(branch)
        for controlled in running:
            controlled.process.kill(STOP_GRACE_SECONDS)

    def is_stopped(self, branch: str) -> bool:
        """Whether somebody has stopped what ran in it."""
        with self._lock:
            return branch in self._stopped

    def tell(self, branch: str, text: str) -> None:
        """Adds a line to the steer file of what runs in a branch.

        BranchError if no process of it has one, or it was told too much already.
        """
        found = self._of(branch)
        files = [controlled.words for controlled in found if controlled.words is not None]
        tellers = [controlled.tell for controlled in found if controlled.tell is not None]
        for tell in tellers:
            tell(text)
        if not files and not tellers:
            raise BranchError(
                f"branch {branch!r} was not told: what runs there has no steer file", branch=branch
            )
        for file in files:
            append_message(file, branch, text)

    def keep(self, branch: str) -> None:
        """Leaves a branch open after the call, unless it is the winner's.

        Under the policy first-winner it is stale if another one is committed.
        """
        with self._lock:
            self._kept.add(branch)

    def keeps(self, branch: str) -> bool:
        """Whether somebody asked to keep it."""
        with self._lock:
            return branch in self._kept

    def _of(self, branch: str) -> list[_Controlled]:
        with self._lock:
            found = list(self._running.get(self._called.get(branch, branch), ()))
        if not found:
            raise BranchError(
                f"nothing that runs in branch {branch!r} can be steered: it has ended, or waits "
                "for its turn, or is a function of the program that tries it",
                branch=branch,
            )
        return found


def append_message(file: Path, branch: str, text: str) -> None:
    """Adds a line to a steer file. BranchError when what runs there was told too much already."""
    line = (" ".join(text.split()) + "\n").encode("utf-8", "replace")
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size + len(line) > WORDS_BYTES_MAX:
            raise BranchError(
                f"branch {branch!r} was not told: it has been told {WORDS_BYTES_MAX} bytes already",
                branch=branch,
            )
        os.write(descriptor, line)
    finally:
        os.close(descriptor)
