"""Forwards the output of a command to this process's outputs, and keeps a copy.

    with OutputTee(keep, owner=owner) as tee:
        Command(argv, stdout=tee.stdout, stderr=tee.stderr, terminal=tee.terminal, …).run()
        tee.finish()

For an output that is a terminal the command gets a pseudo-terminal, otherwise a pipe. If standard
output and standard error are the same file, the command gets one pipe for both, which preserves the
order. Each output has its own thread, so an output that is not read does not block the other.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from branching.errors import ProcessBranchError
from branching.process.pipes import write_all
from branching.process.run_as import Owner

if TYPE_CHECKING:
    from branching.process.pty_proxy import PtyProxy

_READ_BYTES = 65536

Keep = Callable[[bytes], None]


class OutputTee:
    """The outputs of one command, and of its setup command."""

    def __init__(
        self,
        keep: Callable[[], Keep],
        *,
        owner: Owner | None,
        stdout: int = 1,
        stderr: int = 2,
    ) -> None:
        """Creates the pipes and the pseudo-terminal.

        Args:
            keep: Called for each output. Returns a function that receives a copy of the bytes, and
                empty bytes at the end.
            owner: The user of the command.
            stdout: The descriptor to forward standard output to.
            stderr: The descriptor to forward standard error to.
        """
        self._new_keep = keep
        self._owner = owner
        self._ends: list[int] = []
        self._threads: list[threading.Thread] = []
        self._failure: OSError | None = None
        is_input = os.isatty(0)
        terminals = [number for number in (stdout, stderr) if os.isatty(number)]
        self.terminal: PtyProxy | None = None
        if is_input or terminals:
            from branching.process.pty_proxy import PtyProxy

            number = 0 if is_input else 1 if os.isatty(stdout) else 2
            self.terminal = PtyProxy(
                (terminals or [0])[0], keep(), owner, number=number, takes_keys=is_input
            )
        self.stdout = self._output(stdout)
        self.stderr = self.stdout if _is_same(stdout, stderr) else self._output(stderr)

    def pipe(self, to: int) -> int:
        """Returns the write end of a new pipe that is forwarded to the descriptor `to`."""
        source, end = os.pipe2(os.O_CLOEXEC)
        if self._owner is not None:
            # Opening /dev/stdout or /proc/self/fd/N checks the permissions of the pipe.
            os.fchown(end, self._owner.uid, self._owner.gid)
        self._ends.append(end)
        thread = threading.Thread(
            target=self._carry, args=(source, to, self._new_keep()), name="output", daemon=True
        )
        thread.start()
        self._threads.append(thread)
        return end

    def finish(self) -> None:
        """Closes the pipes and waits until all data is forwarded.

        Raises:
            ProcessBranchError: The data could not be written. A closed pipe (EPIPE) is no error.
        """
        while self._ends:
            os.close(self._ends.pop())
        for thread in self._threads:
            thread.join()
        if self._failure is not None:
            raise ProcessBranchError(
                f"what the command printed could not be written: {self._failure.strerror}"
            ) from self._failure

    def resize(self) -> None:
        """Copies the size of this process's terminal to the pseudo-terminal."""
        if self.terminal is not None:
            self.terminal.resize()

    def __enter__(self) -> OutputTee:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.finish()
        except ProcessBranchError:
            if error is None:
                raise
        finally:
            if self.terminal is not None:
                self.terminal.close()

    def _output(self, to: int) -> int:
        if self.terminal is not None and os.isatty(to):
            return self.terminal.slave
        return self.pipe(to)

    def _carry(self, source: int, to: int, keep: Keep) -> None:
        with open(source, "rb", buffering=0) as pipe:  # writers get SIGPIPE after it is closed
            while arrived := pipe.read(_READ_BYTES):
                try:
                    write_all(to, arrived)
                except OSError as error:
                    if error.errno != errno.EPIPE:
                        self._failure = error
                    break
                finally:
                    keep(arrived)
        keep(b"")


def _is_same(first: int, second: int) -> bool:
    return os.path.sameopenfile(first, second)
