"""Files that are open in the workspace while the interpreter changes its branch. In the sandbox.

A descriptor belongs to the branch in which it was opened. Before a fork or a commit the interpreter
is parked: each descriptor of the workspace is noted (path, flags, offset), and its number is kept
with /dev/null. Unparking opens the files again in the branch that is seen then, at the same numbers
and offsets: Python's file objects, with what they have buffered, do not notice.

What cannot be carried over is found before anything is changed (`obstacles`).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from branching._linux import memory

_REOPENED_FLAGS = (
    os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK | os.O_SYNC | os.O_DSYNC | os.O_DIRECT
    | os.O_NOATIME | os.O_DIRECTORY | os.O_PATH
)  # fmt: skip
_GPU = "/dev/nvidia"
_DELETED = " (deleted)"
_COMMAND_CHARACTERS_MAX = 80
_THREAD_END_MILLISECONDS_MAX = 20
_START_MILLISECONDS_MAX = 100
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_OMP_PAUSE_SOFT = 1
_INTERPRETERS = ("_interpreters", "_xxsubinterpreters")
"""Modules that make interpreters: of Python 3.13, and of earlier ones."""
_INOTIFY = "anon_inode:inotify"
_MEMORY_DEVICES = 1
"""Major number of /dev/null, /dev/urandom and the like: all who read one get the same."""
_PF_EXITING = 0x4
"""A flag in /proc/PID/stat: the process has left its program."""


@dataclass(frozen=True, kw_only=True)
class Obstacles:
    """What is in the way of a fork or a change of branch."""

    refusals: list[str]
    """It is not done."""
    warnings: list[str]
    """It is done, and parent and children share these things."""


@dataclass(frozen=True, kw_only=True)
class _File:
    """An open file of the workspace: descriptors that share one offset."""

    numbers: dict[int, bool]
    """Each descriptor, and whether programs inherit it."""
    path: str
    flags: int
    offset: int | None


class Parked:
    """A parked interpreter: what is to be opened again."""

    def __init__(self, at: str, own: Collection[int]) -> None:
        """Closes the files in the workspace at the path `at`, and leaves the directory.

        The descriptors `own` are not touched. Raises OSError if a file could not be opened again;
        nothing is changed then.
        """
        self._files = _files_in(at, own)
        self._directory: str | None = None
        for file in self._files:
            _check_can_be_opened(file)
        with suppress(FileNotFoundError):  # the directory was removed
            directory = os.getcwd()
            if _is_in(directory, at):
                self._directory = directory
                os.chdir("/")
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for file in self._files:
            for number in file.numbers:
                os.dup2(nothing, number, inheritable=False)
        os.close(nothing)

    def unpark(self) -> list[str]:
        """Opens everything again. Returns what could not be opened, and why."""
        failed = []
        if self._directory is not None:
            try:
                os.chdir(self._directory)
            except OSError as error:
                failed.append(f"the directory {self._directory}: {error.strerror}")
        for file in self._files:
            try:
                opened = os.open(file.path, file.flags)
            except OSError as error:
                failed.append(f"{file.path}: {error.strerror}")
                continue
            if file.offset is not None:
                os.lseek(opened, file.offset, os.SEEK_SET)
            for number, is_inheritable in file.numbers.items():
                os.dup2(opened, number, inheritable=is_inheritable)
            os.close(opened)
        return failed


def own_offsets(own: Collection[int]) -> None:
    """Gives a forked child offsets of its own in the files that it only reads."""
    for number in descriptors():
        if number in own:
            continue
        with suppress(OSError):
            flags = fcntl.fcntl(number, fcntl.F_GETFL)
            if not stat.S_ISREG(os.fstat(number).st_mode) or flags & os.O_ACCMODE != os.O_RDONLY:
                continue
            opened = os.open(f"/proc/self/fd/{number}", flags & _REOPENED_FLAGS | os.O_CLOEXEC)
            os.lseek(opened, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
            os.dup2(opened, number, inheritable=os.get_inheritable(number))
            os.close(opened)


def obstacles(at: str, own: Collection[int], *, allows_threads: bool) -> Obstacles:
    """Finds what a fork, or a change of branch, would lose, break or share."""
    refusals: list[str] = []
    warnings: list[str] = []
    names = python_threads()
    if names and not allows_threads:
        refusals.append(f"running threads, which a fork does not copy: {', '.join(names)}")
    if not allows_threads and _has_timer():
        refusals.append("a running timer (signal.alarm, signal.setitimer), which a fork stops")
    if others := _library_threads(len(names)):
        warnings.append(f"{others} threads of libraries: they end in the children")
    if pending := signal.sigpending():
        refusals.append(f"blocked signals, which a fork loses: {', '.join(map(_signal, pending))}")
    if _has_subinterpreters():
        refusals.append("other interpreters in this process, which a fork ends")
    with open("/proc/self/maps") as table:
        refusals += shared_mappings(table)
    refusals += [f"a running child process: {name}" for name in _children()]
    directory = os.readlink("/proc/self/cwd")
    if directory.endswith(_DELETED) and _is_in(directory.removesuffix(_DELETED), at):
        refusals.append(f"a working directory that was deleted: {directory}")
    for number in descriptors():
        if number not in own:
            with suppress(FileNotFoundError):  # that of the listing itself
                _look_at(number, at, refusals, warnings)
    for file in _files_in(at, own):
        if not any(file.path in refusal for refusal in refusals):
            try:
                _check_can_be_opened(file)
            except OSError as error:
                refusals.append(
                    f"an open file of the workspace that cannot be opened again: {file.path}: "
                    f"{error.strerror}"
                )
    return Obstacles(refusals=list(dict.fromkeys(refusals)), warnings=warnings)


def _look_at(number: int, at: str, refusals: list[str], warnings: list[str]) -> None:
    """Adds what is in the way of an open file."""
    target = os.readlink(f"/proc/self/fd/{number}")
    facts = _read("self", f"fdinfo/{number}")
    found = os.fstat(number)
    flags = fcntl.fcntl(number, fcntl.F_GETFL)
    if refusal := refused_file(at, target, found, flags, is_locked=b"\nlock:" in facts):
        refusals.append(refusal)
    elif _is_half_listed(number, found, flags):
        refusals.append(f"a listing of {target} that was not read to its end")
    elif target == _INOTIFY and _watches(facts, os.stat(at).st_dev):
        refusals.append("a watch on files of the workspace (inotify)")
    elif warning := shared_file(number, target, found):
        warnings.append(warning)


def _has_timer() -> bool:
    """Whether a timer runs: one of this process, or one that `timer_create` has made."""
    if any(signal.getitimer(timer)[0] for timer in _TIMERS):
        return True
    with suppress(FileNotFoundError):  # a kernel without CONFIG_CHECKPOINT_RESTORE
        return bool(_read("self", "timers"))
    return False


def _signal(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _has_subinterpreters() -> bool:
    for name in _INTERPRETERS:
        if module := sys.modules.get(name):
            return len(module.list_all()) > 1
    return False


def _watches(facts: bytes, device: int) -> bool:
    """Whether an inotify instance watches something on a file system; of its /proc/PID/fdinfo."""
    kernel_number = os.major(device) << 20 | os.minor(device)
    return any(b" sdev:%x " % kernel_number in line for line in facts.splitlines())


def python_threads() -> list[str]:
    """Returns the names of the threads that run Python code, without the main thread."""
    known = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    return [known.get(ident, f"thread {ident}") for ident in sys._current_frames() if ident != main]


def _library_threads(python_threads: int) -> int:
    """Returns the number of other threads. One that Python has joined needs a moment to end."""
    for _ in range(_THREAD_END_MILLISECONDS_MAX):
        others = len(os.listdir("/proc/self/task")) - 1 - python_threads
        if others <= 0:
            return 0
        time.sleep(0.001)
    return others


def end_openmp_threads() -> None:
    """Ends the threads of GCC's OpenMP, which starts them again. A child would wait for them."""
    with open("/proc/self/maps") as table:
        libraries = {line.split(maxsplit=5)[5].strip() for line in table if "/libgomp" in line}
    for path in libraries:
        with suppress(OSError, AttributeError):  # older than OpenMP 5.0
            ctypes.CDLL(path, os.RTLD_NOLOAD).omp_pause_resource_all(_OMP_PAUSE_SOFT)


def shared_mappings(table: Iterable[str]) -> list[str]:
    """Returns the writable mappings that a child would share, of a /proc/PID/maps."""
    found = []
    for mapping in filter(None, map(memory.parse, table)):
        is_shared = mapping.is_writable and not mapping.is_private
        if is_shared and not mapping.path.startswith(_GPU):
            found.append(f"shared writable memory: {mapping.path.strip() or 'without a name'}")
    return found


def refused_file(
    at: str, target: str, found: os.stat_result, flags: int, *, is_locked: bool = False
) -> str | None:
    """Says why an open file cannot be carried over; None if it can."""
    if target.startswith(_GPU):
        return f"a CUDA context: {target} is open"
    is_regular = stat.S_ISREG(found.st_mode)
    if is_locked:
        return f"a lock on {target}, which would be lost"
    if _is_in(target.removesuffix(_DELETED), at):
        if found.st_nlink == 0:
            return f"an open file of the workspace that was deleted: {target}"
        if not is_regular and not stat.S_ISDIR(found.st_mode):
            return f"an open special file of the workspace: {target}"
        return None
    if is_regular and flags & os.O_ACCMODE != os.O_RDONLY and not flags & os.O_PATH:
        return f"a file that is open for writing outside of the workspace: {target}"
    return None


def _is_half_listed(number: int, found: os.stat_result, flags: int) -> bool:
    """Whether a directory is being listed: opened again, the listing would begin anew."""
    is_directory = stat.S_ISDIR(found.st_mode) and not flags & os.O_PATH
    return is_directory and os.lseek(number, 0, os.SEEK_CUR) != 0


def shared_file(number: int, target: str, found: os.stat_result) -> str | None:
    """Says what parent and children share of an open file; None if it is nothing."""
    is_device = stat.S_ISBLK(found.st_mode) or stat.S_ISCHR(found.st_mode)
    is_stream = stat.S_ISSOCK(found.st_mode) or stat.S_ISFIFO(found.st_mode)
    has_state = is_device and os.major(found.st_rdev) != _MEMORY_DEVICES
    if has_state or is_stream or target.startswith("anon_inode:"):
        return f"descriptor {number} ({target}) is shared by all"
    return None


def _files_in(at: str, own: Collection[int]) -> list[_File]:
    files: list[_File] = []
    for number in descriptors():
        if number in own:
            continue
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
            flags = fcntl.fcntl(number, fcntl.F_GETFL) & _REOPENED_FLAGS
        except OSError:
            continue  # that of the listing itself
        if not _is_in(path, at):
            continue
        is_regular = stat.S_ISREG(os.fstat(number).st_mode) and not flags & os.O_PATH
        offset = os.lseek(number, 0, os.SEEK_CUR) if is_regular else None
        file = _File(
            numbers={number: os.get_inheritable(number)},
            path=path,
            flags=flags | os.O_CLOEXEC | os.O_NOFOLLOW,
            offset=offset,
        )
        for other in files:
            if _is_one_open_file(other, file):
                other.numbers.update(file.numbers)
                break
        else:
            files.append(file)
    return files


def _is_one_open_file(one: _File, other: _File) -> bool:
    """Whether two descriptors are duplicates: moving the offset of one moves that of the other."""
    if (one.path, one.flags, one.offset) != (other.path, other.flags, other.offset):
        return False
    if one.offset is None:
        return False
    first, second = next(iter(one.numbers)), next(iter(other.numbers))
    os.lseek(first, one.offset + 1, os.SEEK_SET)
    is_moved = os.lseek(second, 0, os.SEEK_CUR) != one.offset
    os.lseek(first, one.offset, os.SEEK_SET)
    return is_moved


def _check_can_be_opened(file: _File) -> None:
    """Raises OSError if the path does not lead to the open file any more, or not to us."""
    opened = os.open(file.path, file.flags)
    try:
        number = next(iter(file.numbers))
        if not os.path.samestat(os.fstat(opened), os.fstat(number)):
            raise FileExistsError(0, "another file has taken the place of the open one", file.path)
    finally:
        os.close(opened)


def _children() -> list[str]:
    """Returns the command lines of this process's children that still run.

    A killed child of an earlier fork exits while its memory is freed, which takes milliseconds.
    """
    found = []
    for pid, _, state, flags in _all_children():
        has_ended = state in (b"Z", b"X") or flags & _PF_EXITING
        with suppress(OSError):
            if not has_ended and not _is_killed(_read(pid, "status")):
                found.append(_command_line(pid))
    return found


def ended_children() -> dict[int, str]:
    """Returns the names of this process's children that have ended and were not waited for."""
    return {int(pid): name for pid, name, state, _ in _all_children() if state == b"Z"}


def _all_children() -> Iterator[tuple[str, str, bytes, int]]:
    """Lists this process's children: process id, name, state and flags of /proc/PID/stat."""
    me = str(os.getpid()).encode()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            name, _, facts = _read(pid, "stat").partition(b"(")[2].rpartition(b")")
            state, parent, *_, flags = facts.split()[:7]
            if parent == me:
                yield pid, os.fsdecode(name), state, int(flags)


def _is_killed(status: bytes) -> bool:
    """Whether a process has a pending SIGKILL: it will run nothing more."""
    pending = [int(line.split()[1], 16) for line in status.splitlines() if b"Pnd:" in line]
    return any(signals >> signal.SIGKILL - 1 & 1 for signals in pending)


def _command_line(pid: str) -> str:
    """Returns a process's command line. It is empty for a moment while a program is started."""
    for _ in range(_START_MILLISECONDS_MAX):
        if words := os.fsdecode(_read(pid, "cmdline").replace(b"\0", b" ").strip()):
            return words[:_COMMAND_CHARACTERS_MAX]
        time.sleep(0.001)
    return f"process {pid}"


def _read(pid: str, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()


def descriptors() -> list[int]:
    """Returns the numbers of all open files."""
    return [int(name) for name in os.listdir("/proc/self/fd")]


def _is_in(path: str, directory: str) -> bool:
    return path == directory or path.startswith(f"{directory}/")
