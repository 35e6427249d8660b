"""Supervises a running process: reads its output, waits for its end, and handles kill requests.

One thread supervises, and waits for all of it in one poll(2): the end of the process, its pipes,
the time limit, and kill requests. Other threads may call `kill()`, which only wakes that thread.
So may a signal handler, which Python runs in the main thread. If that is the supervising thread, a
signal could come just before the wait begins, and its handler would run only after the wait. So
Python writes a byte into the same pipe for each signal (signal.set_wakeup_fd).
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from branching.process.pipes import Pipes
from branching.process.process_result import ExitStatus

POLL_MILLISECONDS_MAX = 1 << 30
"""The kernel's timeout has 32 bits. This is 12 days; a longer wait is repeated."""
_WAKEUP_BYTES = 4096


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
        # Guards all below. Reentrant, for a signal handler may interrupt the thread that holds it.
        self._lock = threading.RLock()
        self._wakeup: tuple[int, int] | None = None
        """A pipe: what is written there ends the wait."""
        self._kills = 0
        self._kills_until_end = 0
        """How many had come when `supervise` returned."""
        self._kill_asked_at: float | None = None
        self._kill_grace = 0.0
        self._is_terminated = False
        self._is_pause_asked = False
        self._is_paused = False

    @property
    def is_kill_asked(self) -> bool:
        """Its end was requested."""
        return self._kill_asked_at is not None

    def kill(self, grace_seconds: float = 0.0) -> None:
        """Asks for the end: SIGTERM to all of it now, SIGKILL after the grace. Does not wait.

        A second call can shorten the grace, not lengthen it.
        """
        with self._lock:
            self._kills += 1
            now = time.monotonic()
            if self._kill_asked_at is None:
                self._kill_asked_at, self._kill_grace = now, grace_seconds
            else:
                remaining = self._kill_asked_at + self._kill_grace - now
                if grace_seconds < remaining:
                    self._kill_asked_at, self._kill_grace = now, grace_seconds
            self._wake()

    def pause(self, *, is_on: bool) -> None:
        """Suspends all processes until resumed. Does not wait.

        They can be killed meanwhile, and the time limit continues to run.
        """
        with self._lock:
            self._is_pause_asked = is_on
            self._wake()

    def supervise(
        self,
        process: Process,
        pipes: Pipes,
        timeout: float | None = None,
        on_readable: dict[int, Callable[[], None]] | None = None,
    ) -> bool:
        """Waits at most `timeout` seconds.

        Args:
            process: The process.
            pipes: Its pipes.
            timeout: How long to wait. Default: any time.
            on_readable: Functions to call once, when the descriptor is readable.

        Returns:
            True if the process has ended or must be killed now, False if it is still running.
        """
        with self._woken_by_signals():
            try:
                return self._supervise(process, pipes, timeout, on_readable or {})
            finally:
                self._kills_until_end = self._kills

    def _supervise(
        self,
        process: Process,
        pipes: Pipes,
        timeout: float | None,
        on_readable: dict[int, Callable[[], None]],
    ) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
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
            ready = self._wait([process.end, *process.waits_on(), *on_readable], pipes, waits)
            pipes.handle(ready)
            for descriptor in ready & on_readable.keys():
                on_readable.pop(descriptor)()
            if process.end in ready:
                return True
            process.handle_events()
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def deliver(self, pipes: Pipes) -> None:
        """Waits until the output that is left is forwarded, or `kill` is called once more.

        A call since the end of `supervise` counts, too.
        """
        with self._woken_by_signals():
            while not pipes.drain() and self._kills == self._kills_until_end:
                pipes.handle(self._wait([], pipes, []))

    def __enter__(self) -> Supervisor:
        with self._lock:
            self._wakeup = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._wakeup is not None:
                for descriptor in self._wakeup:
                    os.close(descriptor)
            self._wakeup = None

    @contextmanager
    def _woken_by_signals(self) -> Iterator[None]:
        """Has each signal end the wait in the main thread, unless an event loop needs them."""
        assert self._wakeup is not None, "it is attended inside the `with` only"
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
        try:
            yield
        finally:
            if before == -1:
                signal.set_wakeup_fd(-1)

    def _wait(self, descriptors: list[int], pipes: Pipes, seconds: list[float]) -> set[int]:
        """Waits for the descriptors, the pipes and `_wake`. Returns the ready descriptors."""
        assert self._wakeup is not None, "`supervise` and `deliver` have checked it"
        poll = select.poll()
        for descriptor in (self._wakeup[0], *descriptors):
            poll.register(descriptor, select.POLLIN)
        pipes.register(poll)
        ready = {descriptor for descriptor, _ in poll.poll(_milliseconds(seconds))}
        if self._wakeup[0] in ready:
            os.read(self._wakeup[0], _WAKEUP_BYTES)
        return ready

    def _wake(self) -> None:
        if self._wakeup is not None:
            try:
                os.write(self._wakeup[1], b"\0")
            except BlockingIOError:
                pass  # it is full: the thread wakes anyway

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
