"""The open directory of one cgroup, and its control files.

All access is relative to the descriptor, which may belong to a writable mount that has no path. The
process that created a directory holds an exclusive lock (flock) on it. If a directory is not
locked, its process has died, and the directory can be removed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from branching._linux import flock

NAME_PREFIX = "branching-"
"""Name prefix of the cgroups that we create. Only these are removed as leftovers."""
REMOVE_SECONDS_MAX = 10.0
"""A killed process ends within milliseconds, unless it is blocked in the kernel."""

_POLL_SECONDS = 0.001
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


class CgroupDir:
    """An open cgroup directory. `close()` does not remove the cgroup."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.descriptor = descriptor
        self.path = path
        """For messages. Only the descriptor may allow writes."""

    @staticmethod
    def open(path: Path) -> CgroupDir:
        """Opens the cgroup at `path`. Raises OSError if it does not exist."""
        return CgroupDir(os.open(path, _OPEN), path)

    def open_child(self, name: str) -> CgroupDir:
        """Opens a child of this cgroup. Raises OSError if it does not exist."""
        return CgroupDir(os.open(name, _OPEN, dir_fd=self.descriptor), self.path / name)

    def make_child(self, name: str) -> CgroupDir:
        """Creates a child of this cgroup and locks it.

        Another process may remove it as a leftover before it is locked; then it is created again.

        Raises:
            OSError: The cgroup could not be created.
        """
        while True:
            try:
                os.mkdir(name, dir_fd=self.descriptor)
                child = self._open_made(name)
            except OSError as error:
                raise _named(error, self.path / name) from None
            if child is None:
                continue
            flock.lock(child.descriptor)
            if child._is_at(name, self):
                return child
            child.close()

    def remove(self) -> None:
        """Waits until the cgroup has no processes, removes it, and closes it.

        A second call does nothing.

        Raises:
            OSError: It still has processes after `REMOVE_SECONDS_MAX` (EBUSY).
        """
        if self.descriptor < 0:
            return
        deadline = time.monotonic() + REMOVE_SECONDS_MAX
        while True:
            try:
                os.rmdir(f"../{self.path.name}", dir_fd=self.descriptor)
            except FileNotFoundError:
                pass  # removed with its parent
            except OSError as error:
                if time.monotonic() < deadline:
                    time.sleep(_POLL_SECONDS)
                    continue
                raise _named(error, self.path) from None
            self.close()
            return

    def remove_leftovers(self) -> None:
        """Removes the empty children whose process has died."""
        for name in self.children():
            if name.startswith(NAME_PREFIX):
                try:
                    child = self.open_child(name)
                except OSError:
                    continue  # removed meanwhile
                try:
                    if flock.try_lock(child.descriptor):
                        child._remove_tree()
                except OSError:
                    pass  # it has processes
                finally:
                    child.close()

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def children(self) -> list[str]:
        """Returns the names of the children."""
        with os.scandir(self.descriptor) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]

    def processes(self) -> list[int]:
        """Returns the pids in this cgroup and its descendants.

        A process in another pid namespace is listed as 0.
        """
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
        """Returns whether the kernel has this control file."""
        try:
            os.stat(file, dir_fd=self.descriptor)
        except FileNotFoundError:
            return False
        return True

    def read(self, file: str) -> str:
        """Returns the content of a control file. Raises OSError with its path."""
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.descriptor)
            with os.fdopen(descriptor, "rb", buffering=0) as stream:
                return stream.readall().decode("ascii").strip()
        except OSError as error:
            raise _named(error, self.path / file) from None

    def read_fields(self, file: str) -> dict[str, int]:
        """Returns the values of a control file with lines of the form `NAME NUMBER`."""
        pairs = (line.split() for line in self.read(file).splitlines())
        return {name: int(number) for name, number in pairs}

    def write(self, file: str, value: str) -> None:
        """Writes a control file by one system call. Raises OSError with its path."""
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
        except OSError:  # no descriptors left: the cgroup could never be removed
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
