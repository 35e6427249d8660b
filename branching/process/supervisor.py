"""Supervises a running process: reads its output, waits for its end, and handles kill requests.

One thread supervises. Other threads may call `kill()`, which only wakes that thread.
"""

from __future__ import annotations

import os
import select
import threading
import time
from typing import Protocol

from branching.process.pipes import Pipes
from branching.process.process_result import ExitStatus

POLL_MILLISECONDS_MAX = 1 << 30
"""The kernel's timeout has 32 bits. This is 12 days; a longer wait is repeated."""


class Process(Protocol):
    """A running process, with a sandbox or without."""

    pid: int
    end: int
    """A descriptor that is readable when it has ended."""

    def waits_on(self) -> list[int]:
        """Returns the descriptors that `handle_events` has to do with."""

    def poll_seconds(self) -> float | None:
        """The polling interval of `handle_events` in seconds, None if no polling is needed."""

    def handle_events(self) -> None:
        """Handles events other than the end of the process."""

    def terminate(self) -> None:
        """Sends SIGTERM to all of it."""

    def pause(self) -> None:
        """Sends SIGSTOP to all of it."""

    def resume(self) -> None:
        """Sends SIGCONT to all of it."""

    def finish(self) -> ExitStatus:
        """Kills the remaining processes, waits until they have ended, and returns the result."""


class Supervisor:
    """One process's. `with` it while there is a process to supervise."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._bell: int | None = None
        self._kill_asked_at: float | None = None
        self._kill_grace = 0.0
        self._is_terminated = False
        self._is_pause_asked = False
        self._is_paused = False

    @property
    def is_kill_asked(self) -> bool:
        """Somebody asked for its end."""
        return self._kill_asked_at is not None

    def kill(self, grace_seconds: float = 0.0) -> None:
        """Asks for the end: SIGTERM to all of it now, SIGKILL after the grace. Does not wait.

        A second call can shorten the grace, not lengthen it.
        """
        with self._lock:
            now = time.monotonic()
            if self._kill_asked_at is None:
                self._kill_asked_at, self._kill_grace = now, grace_seconds
            else:
                remaining = self._kill_asked_at + self._kill_grace - now
                if grace_seconds < remaining:
                    self._kill_asked_at, self._kill_grace = now, grace_seconds
            if self._bell is not None:
                os.eventfd_write(self._bell, 1)

    def pause(self, *, is_on: bool) -> None:
        """Suspends all processes until resumed. Does not wait.

        They can be killed meanwhile, and the time limit continues to run.
        """
        with self._lock:
            self._is_pause_asked = is_on
            if self._bell is not None:
                os.eventfd_write(self._bell, 1)

    def supervise(self, process: Process, pipes: Pipes, timeout: float | None = None) -> bool:
        """Waits at most `timeout` seconds.

        Returns:
            True if the process has ended or must be killed now, False if it is still running.
        """
        assert self._bell is not None, "it is attended inside the `with` only"
        deadline = None if timeout is None else time.monotonic() + timeout
        poll = select.poll()
        for descriptor in (process.end, self._bell, *process.waits_on(), *pipes.readable()):
            poll.register(descriptor, select.POLLIN)
        while True:
            kill_in = self._kill_in_seconds()
            if kill_in is not None and not self._is_terminated:
                self._is_terminated = True
                process.terminate()
            if kill_in is None and self._is_pause_asked != self._is_paused:
                self._is_paused = not self._is_paused
                (process.pause if self._is_paused else process.resume)()
            if kill_in is not None and kill_in <= 0:
                return True
            left = None if deadline is None else deadline - time.monotonic()
            waits = [wait for wait in (kill_in, left, process.poll_seconds()) if wait is not None]
            ready = {descriptor for descriptor, _ in poll.poll(_milliseconds(waits))}
            for descriptor in pipes.readable():
                if descriptor in ready and not pipes.read(descriptor):
                    poll.unregister(descriptor)
                    pipes.close_readable(descriptor)
            if self._bell in ready:
                os.eventfd_read(self._bell)
            if process.end in ready:
                return True
            before = process.waits_on()
            process.handle_events()
            for descriptor in set(before) - set(process.waits_on()):
                poll.unregister(descriptor)
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def __enter__(self) -> Supervisor:
        with self._lock:
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._bell is not None:
                os.close(self._bell)
            self._bell = None

    def _kill_in_seconds(self) -> float | None:
        with self._lock:
            if self._kill_asked_at is None:
                return None
            return self._kill_asked_at + self._kill_grace - time.monotonic()


def _milliseconds(waits: list[float]) -> int | None:
    # Rounded up: waking a moment early would turn the last millisecond into a busy loop.
    if not waits:
        return None
    return int(min(max(0.0, min(waits)) * 1000, POLL_MILLISECONDS_MAX)) + 1
