"""Access to files of a branch by path, for programs that run outside of the branch.

A command in a branch may create symbolic links, and may replace directories by links at any time.
So the kernel resolves each path beneath the branch's directory (openat2) and refuses symbolic
links, `..` and absolute paths. A process that runs as root acts with the filesystem ids of the
files' owner, in the calling thread only: it reads what the owner may read, and new files belong to
the owner.

All functions block. Each call closes the descriptors that it opens.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from branching._linux import syscalls

NAME_BYTES_MAX = 255
_KEPT_XATTRS = ("user.", "system.posix_acl_access")
"""Extended attributes that a write preserves. File capabilities are not preserved."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A directory entry."""

    name: str
    kind: str
    """"file", "directory", "symlink" or "other"."""
    size: int
    """Size of a regular file in bytes, else 0."""


class ConfinedDir:
    """Access to the files below `directory`.

    Paths are relative to the directory.

    Args:
        directory: The root of all paths.
        owner: The uid and gid to act as, if the process runs as root.

    Raises:
        OSError: With the path as it was passed. ELOOP: a component is a symbolic link. EXDEV: the
            path leads out of the directory. EINVAL: it is not a valid path, or not a regular file.
    """

    def __init__(self, directory: Path, owner: tuple[int, int]) -> None:
        self._directory = directory
        self._owner = owner

    def beside(self, directory: Path) -> ConfinedDir:
        """Returns access to another directory with the same owner."""
        return ConfinedDir(directory, self._owner)

    def read(self, path: str, *, offset: int = 0, limit: int) -> tuple[bytes, int]:
        """Returns at most `limit` bytes from `offset` on, and the size of the file in bytes."""
        with self._acting(), self._opened(path, os.O_RDONLY | os.O_NONBLOCK) as file:
            size = _checked_file(file, path).st_size
            data = b""
            while len(data) < limit and (more := os.pread(file, limit - len(data), offset)):
                data, offset = data + more, offset + len(more)
            return data, size

    def write(self, path: str, data: bytes, *, is_executable: bool | None = None) -> bool:
        """Writes a file atomically.

        Missing parent directories are created. The mode, extended attributes and owner of an
        existing file are preserved.

        Args:
            path: The file.
            data: Its new content.
            is_executable: True sets the execute bits, False clears them, None leaves them.

        Returns:
            True if the file was created, False if it existed.

        Raises:
            OSError: The file is unchanged, and the directories that were created are removed.
        """
        place, _, name = path.rpartition("/")
        if name in ("", ".", "..") or {"", ".", ".."} & set(place.split("/") if place else []):
            raise OSError(errno.EINVAL, "not the name of a file", path)
        if any(len(os.fsencode(part)) > NAME_BYTES_MAX for part in path.split("/")):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
        with self._acting():
            made: list[str] = []
            try:
                self._make_directories(place, made)
                with self._opened(place or ".", os.O_RDONLY | os.O_DIRECTORY) as directory:
                    try:
                        return _replace(directory, name, data, is_executable, path)
                    except OSError as error:  # it may name the temporary file
                        raise OSError(error.errno, error.strerror, path) from error
            except BaseException:
                self._remove_directories(made)
                raise

    def entries(self, path: str = ".", *, limit: int, after: str = "") -> tuple[list[Entry], bool]:
        """Lists a directory in pages.

        Args:
            path: The directory.
            limit: The maximum number of entries.
            after: Only names that sort after this one are listed.

        Returns:
            The entries, sorted by name, and whether the last entry of the directory is included.
        """
        with (
            self._acting(),
            self._opened(path or ".", os.O_RDONLY | os.O_DIRECTORY) as directory,
        ):
            names = sorted(os.listdir(directory))  # noqa: PTH208  (it is a descriptor)
            names = names[bisect_right(names, after) :]
            return [_entry(directory, name) for name in names[:limit]], len(names) <= limit

    def lstat(self, path: str) -> os.stat_result | None:
        """Returns the status of a path, None if it does not exist or leads through a link."""
        try:
            with self._acting(), self._parent(path) as (directory, name):
                return os.lstat(name, dir_fd=directory)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return None
            raise

    def readlink(self, path: str) -> str:
        """Returns the target of a symbolic link."""
        with self._acting(), self._parent(path) as (directory, name):
            return os.readlink(name, dir_fd=directory)

    def remove(self, path: str) -> None:
        """Removes a file, a symbolic link, or a directory with its content.

        Raises:
            OSError: EBUSY for the root directory: nothing is removed. EINVAL for a path that ends
                in "..". Any other error of the removal: some content may have been removed.
        """
        if path == ".":
            raise OSError(errno.EBUSY, "the root cannot be removed", path)
        with self._acting():
            self._remove(path)

    def walk(self, top: str = ".") -> Iterator[tuple[str, os.stat_result]]:
        """Yields all paths below a directory and their status, parents first, sorted by name.

        Entries that are removed during the walk and directories that cannot be opened are skipped.
        Nested branches are not listed.
        """
        try:
            with self._acting(), self._opened(top, os.O_RDONLY | os.O_DIRECTORY) as directory:
                names = sorted(os.listdir(directory))  # noqa: PTH208  (it is a descriptor)
        except OSError:
            return
        for name in names:
            path = name if top == "." else f"{top}/{name}"
            if (found := self.lstat(path)) is not None:
                yield path, found
                if stat.S_ISDIR(found.st_mode):
                    yield from self.walk(path)

    def _remove(self, path: str) -> None:
        with self._parent(path) as (directory, name):
            if not stat.S_ISDIR(os.lstat(name, dir_fd=directory).st_mode):
                os.unlink(name, dir_fd=directory)
                return
            with self._opened(path, os.O_RDONLY | os.O_DIRECTORY) as inside:
                names = os.listdir(inside)  # noqa: PTH208  (it is a descriptor)
            for one in names:
                self._remove(f"{path}/{one}")
            os.rmdir(name, dir_fd=directory)

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        """Yields the parent directory of `path`, open, and the last component."""
        place, _, name = path.rpartition("/")
        if name in ("", "..") or (name == "." and place):
            raise OSError(errno.EINVAL, "not a path in the branch", path)
        with self._opened(place or ".", os.O_PATH | os.O_DIRECTORY) as directory:
            yield directory, name

    def _make_directories(self, path: str, made: list[str]) -> None:
        """Creates the missing directories of a path, and appends the path of each to `made`."""
        done = ""
        for name in path.split("/") if path else []:
            with self._opened(done or ".", os.O_RDONLY | os.O_DIRECTORY) as directory:
                done = f"{done}/{name}" if done else name
                try:
                    os.mkdir(name, dir_fd=directory)
                except FileExistsError:
                    continue  # if it is not a directory, the next open fails
                made.append(done)

    def _remove_directories(self, made: list[str]) -> None:
        """Removes directories that were created for a write that failed, if they are empty."""
        for path in reversed(made):
            try:
                with self._parent(path) as (directory, name):
                    os.rmdir(name, dir_fd=directory)
            except OSError:
                return  # another process uses it

    @contextmanager
    def _opened(self, path: str, flags: int) -> Iterator[int]:
        root = os.open(self._directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            file = _openat2(root, path, flags | os.O_CLOEXEC)
        finally:
            os.close(root)
        try:
            yield file
        finally:
            os.close(file)

    @contextmanager
    def _acting(self) -> Iterator[None]:
        uid, gid = self._owner
        if os.geteuid() != 0 or uid == 0:
            yield
            return
        # Per thread. With them the kernel drops the capabilities that override file permissions.
        before = syscalls.set_filesystem_ids(uid, gid)
        try:
            yield
        finally:
            syscalls.set_filesystem_ids(*before)


def _openat2(directory: int, path: str, flags: int) -> int:
    resolve = syscalls.RESOLVE_NO_LINKS | syscalls.RESOLVE_BENEATH
    return syscalls.openat2(directory, path, flags, resolve=resolve)


def _replace(directory: int, name: str, data: bytes, is_executable: bool | None, path: str) -> bool:
    """Writes a temporary file and renames it over the old one. Returns whether the file is new."""
    old = None
    mode = 0o666 & ~_umask()
    scratch = f".{secrets.token_hex(8)}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        try:
            old = _openat2(directory, name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            mode = stat.S_IMODE(_checked_file(old, path).st_mode)
            if not mode & 0o222:
                raise PermissionError(errno.EACCES, "it is read-only", path)
        except FileNotFoundError:
            pass
        file = os.open(scratch, flags, 0o600, dir_fd=directory)
        try:
            try:
                written = 0
                while written < len(data):
                    written += os.write(file, data[written:])
                if old is not None:
                    _keep_xattrs(old, file)
                os.fchmod(file, _with_execution(mode, is_executable))
            finally:
                os.close(file)
            os.rename(scratch, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            os.unlink(scratch, dir_fd=directory)
            raise
    finally:
        if old is not None:
            os.close(old)
    return old is None


def _keep_xattrs(old: int, new: int) -> None:
    for name in os.listxattr(old):
        if name.startswith(_KEPT_XATTRS):
            os.setxattr(new, name, os.getxattr(old, name))


def _with_execution(mode: int, is_executable: bool | None) -> int:
    if is_executable is None:
        return mode
    # Execute permission for everyone who has read permission.
    bits = (mode & 0o444) >> 2
    return mode | bits if is_executable else mode & ~0o111


def _checked_file(file: int, path: str) -> os.stat_result:
    found = os.fstat(file)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not an ordinary file", path)
    return found


def _entry(directory: int, name: str) -> Entry:
    try:
        found = os.lstat(name, dir_fd=directory)
    except FileNotFoundError:
        return Entry(name=name, kind="other", size=0)  # removed meanwhile
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}
    kind = kinds.get(stat.S_IFMT(found.st_mode), "other")
    return Entry(name=name, kind=kind, size=found.st_size if kind == "file" else 0)


def _umask() -> int:
    # os.umask() reads the umask only by changing it, which affects other threads.
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:  # noqa: PTH123
        for row in status:
            if row.startswith("Umask:"):
                return int(row.split()[1], 8)
    return 0o022
