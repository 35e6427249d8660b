"""A terminal of the command's own, so that what it prints there can be kept.

    our terminal <-> us <-> master | slave <-> the command, in a session of its own

The command finds what it would find on ours: the same settings and size, keys, Ctrl-C and Ctrl-Z
that reach it and not us. While we are in front our terminal is raw: every key goes through as it
is, and the command's terminal makes of it what the command wants. In the background (`&`, `bg`)
keys are not ours to take; brought in front we take them.

Until the command runs our terminal stays as it is: Ctrl-C is a signal for us, which ends the call.
Carried on, it would reach a terminal that no process is in front of yet, and be lost.

What was typed and the command has not read when it ends is lost, as it is behind ssh.
"""

from __future__ import annotations

import fcntl
import os
import select
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from branching.process.job_control import stop_own_group, without_stops
from branching.process.run_as import Owner

FRONT_POLL_SECONDS = 0.1
"""How often we look whether we were brought in front; nobody tells."""
DELIVER_SECONDS_MAX = 10.0
"""How long the end waits for a terminal that takes nothing more."""
_QUIET_SECONDS = 0.02
_QUIET_SECONDS_MAX = 1.0
"""Before all is stopped, what the command has printed until then is shown."""
_READ_BYTES = 65536
_OUTPUT = 1
"""Index of the output settings in what tcgetattr returns."""


class PtyProxy:
    """A terminal for one command. Use it by `lent()`, which ends it."""

    is_own = True

    def __init__(
        self,
        ours: int,
        keep: Callable[[bytes], None],
        owner: Owner | None,
        *,
        number: int,
        takes_keys: bool,
    ) -> None:
        """`ours` is a descriptor of our terminal; `keep` is handed a copy of what is printed, and
        nothing at its end.

        `number` is the command's own descriptor for it. Without `takes_keys` the command's input
        is something else, and the keys are not for it.
        """
        self._ours = ours
        self.number = number
        self._keep = keep
        self.takes_keys = takes_keys
        self._settings = termios.tcgetattr(ours)
        self._is_raw = False
        self._keys_lock = threading.Lock()  # guards _is_raw, and our terminal's settings
        self._showing = threading.Lock()  # held while something is on its way to our terminal
        self._has_begun = False  # the command runs; written before the next
        self._is_decided = threading.Event()  # whether the command runs
        self._is_settled = threading.Event()  # our terminal is as the command's output wants it
        self._ended = os.eventfd(0, os.EFD_CLOEXEC)
        self._master, self.slave = os.openpty()
        """`slave` is the command's end."""
        self._open = {self._ended, self._master, self.slave}
        os.set_blocking(self._master, False)
        self._starts_in_front = takes_keys and self._is_in_front()
        settings = termios.tcgetattr(ours)
        if not self._starts_in_front:
            settings[_OUTPUT] &= ~termios.OPOST  # ours does that
        termios.tcsetattr(self.slave, termios.TCSANOW, settings)
        if owner is not None:
            os.fchown(self.slave, owner.uid, owner.gid)  # it may open it by name
        self.resize()

    def resize(self) -> None:
        """Gives the command's terminal the size of ours; the kernel tells the command."""
        if self._master not in self._open:
            return
        try:
            size = fcntl.ioctl(self._ours, termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)
        except OSError:
            pass  # ours is gone, or the command's: nobody looks at it any more

    def begin(self) -> None:
        """Begins to carry keys and output: the command runs, in front on its terminal."""
        self._has_begun = True
        self._is_decided.set()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Carries keys and output from `begin` to the end of the `with`, when all was shown."""
        shower = threading.Thread(target=self._show, name="terminal output", daemon=True)
        typist = threading.Thread(target=self._type, name="keys", daemon=True)
        shower.start()
        typist.start()
        try:
            yield
        finally:
            self._is_decided.set()
            self._close(self.slave)  # ours was the last: then its output has an end
            shower.join(DELIVER_SECONDS_MAX)
            os.eventfd_write(self._ended, 1)
            typist.join()
            with self._keys_lock:
                self._restore()
            if not shower.is_alive():
                self.close()

    def close(self) -> None:
        """Closes it, whether it was lent or not."""
        for descriptor in tuple(self._open):
            self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        if descriptor in self._open:
            self._open.remove(descriptor)
            os.close(descriptor)

    def take_back(self) -> None:
        """Does nothing: ours was never given away."""

    def stop_along(self, leader: int) -> None:  # noqa: ARG002  (as of a terminal that is lent)
        """Stops our own group, for the command was stopped; woken in front, goes on as before."""
        until = time.monotonic() + _QUIET_SECONDS_MAX
        while self._has_more() and time.monotonic() < until:
            time.sleep(_QUIET_SECONDS)
        with self._keys_lock, self._showing:
            self._restore()
            stop_own_group()

    def _has_more(self) -> bool:
        return bool(select.select([self._master], [], [], _QUIET_SECONDS)[0])

    def _show(self) -> None:
        self._is_settled.wait()
        while self._show_more():
            pass
        self._keep(b"")

    def _show_more(self) -> bool:
        select.select([self._master], [], [])
        with self._showing:
            try:
                arrived = os.read(self._master, _READ_BYTES)
            except OSError:  # EIO: nobody has the other end any more
                return False
            try:
                write_all(self._ours, arrived)
            except OSError:
                pass  # hung up: we are told by a signal; what is printed is still kept
        self._keep(arrived)
        return bool(arrived)

    def _type(self) -> None:
        self._is_decided.wait()
        is_needed = self.takes_keys and self._has_begun
        with without_stops():
            try:
                if is_needed:
                    self._enter_raw()
            finally:
                self._is_settled.set()
            if not is_needed:
                return
            poll = select.poll()
            poll.register(self._ended, select.POLLIN)
            while not poll.poll(0 if self._enter_raw() else FRONT_POLL_SECONDS * 1000):
                if self._is_raw and not self._carry_keys():
                    return

    def _carry_keys(self) -> bool:
        """Waits for keys, or the end, and hands them on. False when there will be no more."""
        select.select([self._ours, self._ended], [], [], FRONT_POLL_SECONDS)
        with self._keys_lock:
            if not self._is_raw or not select.select([self._ours], [], [], 0)[0]:
                return True
            try:
                keys = os.read(self._ours, _READ_BYTES)
            except OSError:
                return self._is_in_front()
        while keys:
            # Who does not read its keys must not keep us from hearing of its end.
            if not select.select([self._ended], [self._master], [])[1]:
                return False
            keys = keys[os.write(self._master, keys) :]
        return True

    def _is_in_front(self) -> bool:
        try:
            return os.tcgetpgrp(self._ours) == os.getpgrp()
        except OSError:
            return False

    def _enter_raw(self) -> bool:
        """Makes our terminal raw if it is ours just now."""
        with self._keys_lock:
            if not self._is_raw and self._is_in_front():
                self._settings = termios.tcgetattr(self._ours)
                if not self._starts_in_front:
                    # Until now it was as the shell has it while it waits for a line.
                    termios.tcsetattr(self._master, termios.TCSANOW, self._settings)
                    self._starts_in_front = True
                tty.setraw(self._ours, termios.TCSADRAIN)
                self._is_raw = True
                self.resize()
            return self._is_raw

    def _restore(self) -> None:
        if not self._is_raw:
            return
        self._is_raw = False
        with without_stops():
            try:
                termios.tcsetattr(self._ours, termios.TCSADRAIN, self._settings)
            except termios.error:
                pass  # it is gone


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all of it, waiting as long as it takes."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            select.select([], [descriptor], [])  # somebody has made it non-blocking
