"""Our outputs, lent to commands in such a way that what they print can also be kept.

    with OutputTee(keep, owner=owner) as relay:
        Command(argv, stdout=relay.stdout, stderr=relay.stderr, terminal=relay.terminal, …).run()
        relay.finish()

Every byte goes where it would have gone, and a copy is kept. Where ours is a terminal the command
gets one of its own; where it is not, a pipe; outputs that are one and the same stay one, in the
order of what was printed. Each has a thread: one that is not read does not hold up the other.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from types import TracebackType

from branching.errors import ProcessBranchError
from branching.process.pty_proxy import PtyProxy, write_all
from branching.process.run_as import Owner

_READ_BYTES = 65536

Keep = Callable[[bytes], None]


class OutputTee:
    """The outputs of one command and of what prepares it."""

    def __init__(
        self,
        keep: Callable[[], Keep],
        *,
        owner: Owner | None,
        stdout: int = 1,
        stderr: int = 2,
    ) -> None:
        """`keep()` returns what is handed a copy of one output; `stdout` and `stderr` are where
        the outputs go.
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
            number = 0 if is_input else 1 if os.isatty(stdout) else 2
            self.terminal = PtyProxy(
                (terminals or [0])[0], keep(), owner, number=number, takes_keys=is_input
            )
        self.stdout = self._output(stdout)
        self.stderr = self.stdout if _is_same(stdout, stderr) else self._output(stderr)

    def pipe(self, to: int) -> int:
        """Returns a new pipe's end; what is written to it goes `to` that descriptor."""
        source, end = os.pipe2(os.O_CLOEXEC)
        if self._owner is not None:
            # /dev/stdout and /proc/self/fd/N open the pipe anew, as the program's own user.
            os.fchown(end, self._owner.uid, self._owner.gid)
        self._ends.append(end)
        thread = threading.Thread(
            target=self._carry, args=(source, to, self._new_keep()), name="output", daemon=True
        )
        thread.start()
        self._threads.append(thread)
        return end

    def finish(self) -> None:
        """Waits until everything is where it belongs. ProcessBranchError if it could not be
        written there; that who reads it went away is no failure.
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
        """Takes notice that our terminal may have another size."""
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
        with open(source, "rb", buffering=0) as pipe:  # closed, it ends who goes on writing
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
