"""One control group's directory, held open, and its control files.

All access is relative to the descriptor: it may lead through a writable mount that has no path.
A directory that we made is locked (flock) as long as we hold it. A lock that is free tells that
its maker is gone, killed perhaps, and that what it left may be cleared away.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

NAME_PREFIX = "branching-"
"""Of every group made at the top of our place; nothing else is ever cleared away there."""
REMOVE_SECONDS_MAX = 10.0
"""SIGKILL works at once unless the kernel itself is stuck; then waiting longer does not help."""

_POLL_SECONDS = 0.001
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


class CgroupDir:
    """An open control group. `close()` it when done; that alone removes nothing."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.descriptor = descriptor
        self.path = path
        """For messages. Writing may be possible through the descriptor alone."""

    @staticmethod
    def open(path: Path) -> CgroupDir:
        """Opens the group at `path`. OSError if it is not there."""
        return CgroupDir(os.open(path, _OPEN), path)

    def open_child(self, name: str) -> CgroupDir:
        """Opens a group below this one. OSError if it is not there."""
        return CgroupDir(os.open(name, _OPEN, dir_fd=self.descriptor), self.path / name)

    def make_child(self, name: str) -> CgroupDir:
        """Makes a group below this one and locks it. OSError if it cannot be made.

        Before it is locked, somebody clearing up may take it for a leftover and remove it: then it
        is made anew.
        """
        while True:
            try:
                os.mkdir(name, dir_fd=self.descriptor)
                child = self._open_made(name)
            except OSError as error:
                raise _named(error, self.path / name) from None
            if child is None:
                continue
            fcntl.flock(child.descriptor, fcntl.LOCK_EX)
            if child._is_at(name, self):
                return child
            child.close()

    def remove(self) -> None:
        """Removes the group, once its last process is gone, and closes it.

        OSError (EBUSY) when it still has processes after a bounded wait. A
        second call does nothing.
        """
        if self.descriptor < 0:
            return
        deadline = time.monotonic() + REMOVE_SECONDS_MAX
        while True:
            try:
                os.rmdir(f"../{self.path.name}", dir_fd=self.descriptor)
            except FileNotFoundError:
                pass  # whoever made the groups above removed it with them
            except OSError as error:
                if time.monotonic() < deadline:
                    time.sleep(_POLL_SECONDS)
                    continue
                raise _named(error, self.path) from None
            self.close()
            return

    def remove_leftovers(self) -> None:
        """Removes the empty groups below this one whose maker is gone without having done so."""
        for name in self.children():
            if name.startswith(NAME_PREFIX):
                try:
                    child = self.open_child(name)
                except OSError:
                    continue  # its maker has just removed it
                try:
                    fcntl.flock(child.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    child._remove_tree()
                except OSError:
                    pass  # in use: locked, or there are processes in it
                finally:
                    child.close()

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def children(self) -> list[str]:
        """Returns the names of the groups below this one."""
        with os.scandir(self.descriptor) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]

    def processes(self) -> list[int]:
        """Returns the processes in this group and in those below it. 0 is one we cannot see."""
        found = [int(line) for line in self.read("cgroup.procs").split()]
        for name in self.children():
            try:
                child = self.open_child(name)
            except FileNotFoundError:
                continue
            try:
                found += child.processes()
            finally:
                child.close()
        return found

    def has(self, file: str) -> bool:
        """Whether there is such a control file: kernels differ."""
        try:
            os.stat(file, dir_fd=self.descriptor)
        except FileNotFoundError:
            return False
        return True

    def read(self, file: str) -> str:
        """Returns what a control file says. OSError names the file."""
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.descriptor)
            with os.fdopen(descriptor, "rb", buffering=0) as stream:
                return stream.readall().decode("ascii").strip()
        except OSError as error:
            raise _named(error, self.path / file) from None

    def read_fields(self, file: str) -> dict[str, int]:
        """Returns a file of `name number` lines."""
        pairs = (line.split() for line in self.read(file).splitlines())
        return {name: int(number) for name, number in pairs}

    def write(self, file: str, value: str) -> None:
        """Writes a control file, in one go as the kernel wants it. OSError names the file."""
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC, dir_fd=self.descriptor)
            try:
                os.write(descriptor, value.encode("ascii"))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _named(error, self.path / file) from None

    def _open_made(self, name: str) -> CgroupDir | None:
        try:
            return self.open_child(name)
        except FileNotFoundError:
            return None
        except OSError:  # out of descriptors: nobody would ever remove it
            try:
                os.rmdir(name, dir_fd=self.descriptor)
            except FileNotFoundError:
                pass
            raise

    def _is_at(self, name: str, parent: CgroupDir) -> bool:
        try:
            there = os.stat(name, dir_fd=parent.descriptor)
        except FileNotFoundError:
            return False
        return there.st_ino == os.fstat(self.descriptor).st_ino

    def _remove_tree(self) -> None:
        for name in self.children():
            child = self.open_child(name)
            try:
                child._remove_tree()
            finally:
                child.close()
        os.rmdir(f"../{self.path.name}", dir_fd=self.descriptor)


def _named(error: OSError, path: Path) -> OSError:
    return OSError(error.errno, error.strerror, str(path))
