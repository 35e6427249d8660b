"""Kills a process before one of its system calls, which makes a crash at that step repeatable.

A thread of the test traces the process (ptrace(2)) and lets it run from call to call. Counted are
the calls by which others can notice how far the process has come: messages, signals, forks, mounts,
changes of files, waits for children. Calls that only read, wait, or change the process itself are
not steps: a process that is killed before one of them leaves what it would leave at the next step.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
import termios
import threading

_SEIZE, _INTERRUPT, _SYSCALL, _INFO = 0x4206, 0x4207, 24, 0x420E
_TRACE_SYSTEM_CALLS = 0x1
"""PTRACE_O_TRACESYSGOOD: stops at calls have bit 7 of the signal set."""
_WALL = 0x40000000
_HEAD = struct.Struct("=B3xIQQ7Q")
"""ptrace_syscall_info: op, architecture, two pointers, then number and arguments at an entry."""
_ENTRY = 1
_OPENAT, _IOCTL = 257, 16
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT

_STEPS = {
    1: "write", 16: "ioctl", 18: "pwrite64", 20: "writev", 40: "sendfile", 41: "socket",
    42: "connect", 44: "sendto", 46: "sendmsg", 56: "clone", 57: "fork", 58: "vfork",
    59: "execve", 61: "wait4", 62: "kill", 73: "flock", 74: "fsync", 75: "fdatasync",
    76: "truncate", 77: "ftruncate", 82: "rename", 83: "mkdir", 84: "rmdir", 86: "link",
    87: "unlink", 88: "symlink", 90: "chmod", 91: "fchmod", 92: "chown", 93: "fchown",
    94: "lchown", 161: "chroot", 165: "mount", 166: "umount2", 188: "setxattr",
    189: "lsetxattr", 190: "fsetxattr", 231: "exit_group", 257: "openat", 258: "mkdirat",
    260: "fchownat", 263: "unlinkat", 264: "renameat", 265: "linkat", 266: "symlinkat",
    268: "fchmodat", 272: "unshare", 280: "utimensat", 285: "fallocate", 308: "setns",
    316: "renameat2", 326: "copy_file_range", 424: "pidfd_send_signal", 429: "move_mount",
    435: "clone3", 442: "mount_setattr",
}  # fmt: skip
"""Names of the calls that are steps, by their number on x86_64."""
IS_KNOWN = platform.machine() == "x86_64"
"""On other machines each call is a step, and has no name."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


class KilledAtStep:
    """Traces a process, and kills it before its step number `at`. Root only."""

    def __init__(self, pid: int, at: int) -> None:
        self.passed: list[int] = []
        """The numbers of the system calls that were made as steps."""
        self.is_killed = False
        self._pid = pid
        self._at = at
        self._is_seized = threading.Event()
        self._thread = threading.Thread(target=self._trace, daemon=True)
        self._thread.start()
        assert self._is_seized.wait(60), f"cannot trace process {pid}"

    def join(self) -> None:
        """Waits for the end of the process."""
        self._thread.join(60)
        assert not self._thread.is_alive(), f"process {self._pid} has not ended"

    def _trace(self) -> None:
        _ptrace(_SEIZE, self._pid, _TRACE_SYSTEM_CALLS)
        _ptrace(_INTERRUPT, self._pid)
        os.waitpid(self._pid, _WALL)
        self._is_seized.set()
        delivered = 0
        while True:
            try:
                _ptrace(_SYSCALL, self._pid, delivered)
                _, status = os.waitpid(self._pid, _WALL)
            except (ProcessLookupError, ChildProcessError):
                return  # it was killed by somebody else
            if not os.WIFSTOPPED(status):
                return
            number, event = os.WSTOPSIG(status), status >> 16
            delivered = 0 if number & 0x80 or event else number
            if number == signal.SIGTRAP | 0x80:
                self._step()

    def _step(self) -> None:
        if self.is_killed or (call := self._call()) is None:
            return
        if len(self.passed) == self._at:
            self.is_killed = True
            os.kill(self._pid, signal.SIGKILL)
        else:
            self.passed.append(call)

    def _call(self) -> int | None:
        """Returns the number of the system call that is about to be made, if it is a step."""
        info = ctypes.create_string_buffer(_HEAD.size)
        try:
            _ptrace(_INFO, self._pid, ctypes.addressof(info), _HEAD.size)
        except ProcessLookupError:
            return None
        operation, _, _, _, number, *arguments = _HEAD.unpack(info.raw)
        if operation != _ENTRY or (IS_KNOWN and not _is_step(number, arguments)):
            return None
        return int(number)


def name_of(call: int) -> str:
    """Returns the name of a system call that is a step."""
    return _STEPS[call]


def _is_step(number: int, arguments: list[int]) -> bool:
    if number == _OPENAT:
        return bool(arguments[2] & _WRITES)
    if number == _IOCTL:
        return arguments[1] != termios.TCGETS
    return number in _STEPS


def _ptrace(request: int, pid: int, data: int = 0, address: int = 0) -> None:
    if _libc.ptrace(request, pid, address, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
