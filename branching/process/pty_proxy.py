"""A pseudo-terminal for a command, so that a copy of its output can be kept.

    our terminal <-> us <-> master | slave <-> the command, in a session of its own

The pseudo-terminal has the settings and the size of our terminal. While we are in the foreground,
our terminal is in raw mode: all input, including Ctrl-C and Ctrl-Z, is forwarded, and the line
discipline of the pseudo-terminal interprets it. In the background (`&`, `bg`) no input is read.

Until the command runs, our terminal keeps its mode, and Ctrl-C is a signal for us, which ends the
call. If it were forwarded, it would be lost: the pseudo-terminal has no foreground group yet.

Input that the command has not read when it ends is lost, as with ssh.
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
from branching.process.pipes import write_all
from branching.process.run_as import Owner

FRONT_POLL_SECONDS = 0.1
"""Poll interval for becoming the foreground group, for which there is no notification."""
DELIVER_SECONDS_MAX = 10.0
"""How long to wait at the end for a terminal that accepts no output."""
_QUIET_SECONDS = 0.02
_QUIET_SECONDS_MAX = 1.0
"""How long to forward pending output before our group is stopped."""
_READ_BYTES = 65536
_OUTPUT = 1
"""Index of the output settings in what tcgetattr returns."""


class PtyProxy:
    """The pseudo-terminal of one command. Use it in `with proxy.forwarding():`."""

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
        """Opens the pseudo-terminal.

        Args:
            ours: A descriptor of our terminal.
            keep: Receives a copy of the output, and empty bytes at its end.
            owner: The user of the command.
            number: The command's descriptor for the pseudo-terminal.
            takes_keys: Whether to forward input. False if the command's input is not a terminal.
        """
        self._ours = ours
        self.number = number
        self._keep = keep
        self.takes_keys = takes_keys
        self._settings = termios.tcgetattr(ours)
        self._is_raw = False
        self._keys_lock = threading.Lock()  # guards _is_raw, and our terminal's settings
        self._showing = threading.Lock()  # held while output is forwarded to our terminal
        self._has_begun = False  # the command runs; written before the next
        self._is_decided = threading.Event()  # whether the command runs
        self._is_settled = threading.Event()  # our terminal is in the mode for the command's output
        self._ended = os.eventfd(0, os.EFD_CLOEXEC)
        self._master, self.slave = os.openpty()
        """`slave` is the command's end."""
        self._open = {self._ended, self._master, self.slave}
        os.set_blocking(self._master, False)
        self._starts_in_front = takes_keys and self._is_in_front()
        settings = termios.tcgetattr(ours)
        if not self._starts_in_front:
            settings[_OUTPUT] &= ~termios.OPOST  # our terminal does the output processing
        termios.tcsetattr(self.slave, termios.TCSANOW, settings)
        if owner is not None:
            os.fchown(self.slave, owner.uid, owner.gid)  # the command may open it by path
        self.resize()

    def resize(self) -> None:
        """Copies the size of our terminal; the kernel sends SIGWINCH to the command."""
        if self._master not in self._open:
            return
        try:
            size = fcntl.ioctl(self._ours, termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)
        except OSError:
            pass  # one of the terminals was hung up

    def begin(self) -> None:
        """Starts forwarding. The command runs and is in the foreground of the pseudo-terminal."""
        self._has_begun = True
        self._is_decided.set()

    @contextmanager
    def forwarding(self) -> Iterator[None]:
        """Forwards input and output from `begin` until the end of the `with`."""
        shower = threading.Thread(target=self._show, name="terminal output", daemon=True)
        typist = threading.Thread(target=self._type, name="keys", daemon=True)
        shower.start()
        typist.start()
        try:
            yield
        finally:
            self._is_decided.set()
            self._close(self.slave)  # the last descriptor: the output ends
            shower.join(DELIVER_SECONDS_MAX)
            os.eventfd_write(self._ended, 1)
            typist.join()
            with self._keys_lock:
                self._restore()
            if not shower.is_alive():
                self.close()

    def close(self) -> None:
        """Closes the pseudo-terminal."""
        for descriptor in tuple(self._open):
            self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        if descriptor in self._open:
            self._open.remove(descriptor)
            os.close(descriptor)

    def take_back(self) -> None:
        """Does nothing: our group has stayed the foreground group."""

    def stop_along(self, leader: int) -> None:  # noqa: ARG002  (as of a terminal that is forwarding)
        """Stops our own group after the command was stopped; returns when it is continued."""
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
            except OSError:  # EIO: all descriptors of the other end are closed
                return False
            try:
                write_all(self._ours, arrived)
            except OSError:
                pass  # hung up: we get SIGHUP; the output is still kept
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
        """Waits for input and forwards it. Returns False at the end of the input."""
        select.select([self._ours, self._ended], [], [], FRONT_POLL_SECONDS)
        with self._keys_lock:
            if not self._is_raw or not select.select([self._ours], [], [], 0)[0]:
                return True
            try:
                keys = os.read(self._ours, _READ_BYTES)
            except OSError:
                return self._is_in_front()
        while keys:
            # A command that does not read its input must not block us at its end.
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
        """Sets the caller's terminal to raw mode if this process is in the foreground."""
        with self._keys_lock:
            if not self._is_raw and self._is_in_front():
                self._settings = termios.tcgetattr(self._ours)
                if not self._starts_in_front:
                    # The settings read before were the shell's, while it was reading a line.
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
