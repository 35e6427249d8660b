"""Leases: branches that are aborted after the process that created them was killed.

    STORE/agents/claims-9f3c2a1b    the leases of an MCP server
    STORE/agents/leases-9f3c2a1b    the leases of a program that uses the library

Each process has one file and holds an exclusive lock on it. A line `+ID NAME` adds a branch, a line
`-ID NAME` removes it. The kernel releases the lock when the process ends, so a file without a lock
lists branches whose process has died.

The next MCP server aborts the branches that a killed server left. The branches of a `with` block or
a pattern (`creating`) are aborted by the next program that opens the workspace (`drop_leased`). A
program that exits normally removes its leases.

The daemon writes the line of a new branch before the branch exists, to the file that the request
has sent (`creating`). A process that is killed meanwhile leaves no branch without a lease. The
daemon shares the lock until the branch exists, so no process reads the file earlier.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from branching._linux import flock
from branching.errors import BranchNotFoundError
from branching.fs.backend import Backend, BranchRecord, lease_line
from branching.fs.store_files import open_directory, open_file

if TYPE_CHECKING:
    from branching.fs.workspace import Workspace

R = TypeVar("R")

_DIRECTORY = "agents"
_CLAIMS = "claims-"
_LEASES = "leases-"
_TRIES_MAX = 100
"""Another process may remove the empty directory before the file is created in it."""


class BranchLeases:
    """The leases of one process. Thread-safe.

    The file is created by the first `add` and removed by `close`.
    """

    def __init__(self, space: Workspace | Backend, prefix: str = _CLAIMS) -> None:
        self._space = space
        self._prefix = prefix
        self._lock = threading.Lock()  # guards the next two
        self._path: Path | None = None
        self._file: int | None = None

    def add(self, record: BranchRecord) -> None:
        """Adds a branch. Raises OSError if the file cannot be written."""
        self._write(lease_line(record.id, record.name))

    def drop(self, record: BranchRecord) -> None:
        """Removes a branch. It stays open after this process."""
        self._write(f"-{record.id} {record.name}\n")

    def file(self) -> int:
        """Returns the file's descriptor. The daemon adds lines to it."""
        with self._lock:
            if self._file is None:
                self._path, self._file = in_agents_directory(self._space, self._create_file)
            return self._file

    def close(self) -> None:
        """Removes all branches and the file."""
        if self._path is not None and self._file is not None:
            self._path.unlink(missing_ok=True)
            remove_agents_directory(self._path.parent)
            os.close(self._file)
            self._path = self._file = None

    def abandon(self) -> None:
        """Closes the file in a forked process. The leases stay with the parent."""
        if self._file is not None:
            os.close(self._file)
            self._path = self._file = None

    def _write(self, line: str) -> None:
        os.write(self.file(), line.encode())

    def _create_file(self, directory: Path, here: int) -> tuple[Path, int]:
        name = f"{self._prefix}{os.urandom(4).hex()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        file = open_file(f".{name}", flags, directory=here)
        flock.lock(file)
        if os.geteuid() == 0:
            os.fchown(file, *self._space.owner)
        # Renamed after it is locked, so that no other process finds it unlocked.
        os.rename(f".{name}", name, src_dir_fd=here, dst_dir_fd=here)
        return directory / name, file


class _Leases:
    """The leases of this process, by store.

    A store's file is removed with its last branch, so that an empty store can be removed when the
    workspace is closed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._is_registered = False
        self._claims: dict[Path, BranchLeases] = {}
        self._open: dict[Path, set[int]] = {}
        self._creating: Counter[Path] = Counter()

    def begin(self, backend: Backend, store: Path) -> int:
        """Returns the file of leases, which stays open until `finish`."""
        with self._lock:
            file = self._of(backend, store).file()
            self._creating[store] += 1
            return file

    def finish(self, store: Path, record: BranchRecord | None) -> None:
        """Ends a `begin`, after which the branch exists, or was not created."""
        with self._lock:
            self._creating[store] -= 1
            if record is not None:
                self._open.setdefault(store, set()).add(record.id)
            self._close_unused(store)

    def _of(self, backend: Backend, store: Path) -> BranchLeases:
        if not self._is_registered:
            # Exit handlers run in reverse order. The workspace registered its unmount before, so
            # the leases are removed while it is still mounted.
            atexit.register(self.close)
            self._is_registered = True
        return self._claims.setdefault(store, BranchLeases(backend, _LEASES))

    def _close_unused(self, store: Path) -> None:
        if not self._open.get(store) and not self._creating[store] and store in self._claims:
            self._claims.pop(store).close()

    def drop(self, store: Path, record: BranchRecord) -> None:
        with self._lock:
            opened = self._open.get(store, set())
            if record.id not in opened:
                return
            opened.discard(record.id)
            if opened or self._creating[store]:
                self._claims[store].drop(record)
            else:
                self._close_unused(store)

    def close(self) -> None:
        with self._lock:
            while self._claims:
                self._claims.popitem()[1].close()
            self._open.clear()

    def forget(self) -> None:
        """Closes the files in a forked process. The leases stay with the parent."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        while self._claims:
            self._claims.popitem()[1].abandon()
        self._open.clear()
        self._creating.clear()


_leases = _Leases()
os.register_at_fork(after_in_child=_leases.forget)


class creating:  # noqa: N801
    """Adds a lease for a branch that is created in the `with`, before the branch exists.

        with creating(backend) as new:
            new.record = backend.create("name", MAIN_ID, leases=new.file)

    Without effect where the store cannot be written because it belongs to another user: `file` is
    None then. Such a branch stays open when this process is killed.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.file: int | None = None
        self.record: BranchRecord | None = None

    def __enter__(self) -> creating:
        if self._backend.store is not None:
            with suppress(OSError):
                self.file = _leases.begin(self._backend, self._backend.store)
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            assert self._backend.store is not None, "it has the file"
            with suppress(OSError):
                _leases.finish(self._backend.store, self.record)


def end_lease(backend: Backend, record: BranchRecord) -> None:
    """Removes the lease of a branch that has ended or is to stay open."""
    if backend.store is not None:
        with suppress(OSError):
            _leases.drop(backend.store, record)


def drop_leased(space: Workspace) -> list[BranchRecord]:
    """Aborts the branches that killed programs left open, and returns them."""
    return drop_orphaned(space, _LEASES) if _files(space, _LEASES) else []


def orphaned_branches(
    space: Workspace, records: Sequence[BranchRecord] | None = None, prefix: str = _CLAIMS
) -> list[BranchRecord]:
    """Returns the open branches whose process has died, the oldest first.

    Args:
        space: The workspace.
        records: Its open branches, if the caller has listed them.
        prefix: Which kind of lease files to read.
    """
    claimed = {claim for path in _files(space, prefix) for claim in _unlocked(path) or ()}
    if not claimed:
        return []
    opened = space.branches() if records is None else records
    return [each for each in opened if (each.id, each.name) in claimed]


def release(space: Workspace, record: BranchRecord) -> None:
    """Removes the lease of a branch whose process has died, so that the branch stays open.

    Raises:
        OSError: The file cannot be written.
    """
    for path in _files(space):
        if (record.id, record.name) in (_unlocked(path) or ()):
            with _locked(path, os.O_WRONLY | os.O_APPEND) as file:
                if file is not None:
                    os.write(file, f"-{record.id} {record.name}\n".encode())


def drop_orphaned(space: Workspace, prefix: str = _CLAIMS) -> list[BranchRecord]:
    """Aborts the branches whose process has died, and returns them.

    A branch stays open as long as a branch below it belongs to a live process.

    Raises:
        BranchingError: A branch could not be aborted. Its lease stays, so the next call tries
            again.
    """
    # Read before the branches are listed: those whose file has no lock any more exist by now.
    read = {
        path: leases for path in _files(space, prefix) if (leases := _unlocked(path)) is not None
    }
    opened = space.branches()
    claimed = {claim for leases in read.values() for claim in leases}
    found = [each for each in opened if (each.id, each.name) in claimed]
    gone = {record.id for record in found}
    others = [record.branch_path for record in opened if record.id not in gone]
    dropped = [
        record
        for record in found
        if not any(path.startswith(f"{record.branch_path}/") for path in others)
    ]
    for record in reversed(dropped):  # children are younger than their parents
        with suppress(BranchNotFoundError):  # aborted by another process
            space.reopen(record.name).abort()
    for path, leases in read.items():
        with _locked(path) as file:
            is_done = not any(
                (each.id, each.name) in leases for each in found if each not in dropped
            )
            if file is not None and is_done:
                path.unlink(missing_ok=True)
    directory = agents_directory(space)
    if directory is not None:
        remove_agents_directory(directory)
    return dropped


def agents_directory(space: Workspace | Backend) -> Path | None:
    """Returns the store's directory for lock and lease files, None if the back end has no store."""
    return None if space.store is None else space.store / _DIRECTORY


def in_agents_directory(space: Workspace | Backend, create: Callable[[Path, int], R]) -> R:
    """Calls a function that creates a file in the directory of `agents_directory`.

    The directory is created for the workspace's owner if needed. Another process may remove it
    while it is empty; then the call is repeated.

    Args:
        space: The workspace or its back end.
        create: Gets the path of the directory and a descriptor of it.

    Returns:
        What `create` returned.

    Raises:
        FileNotFoundError: The back end has no store, or the store was removed.
    """
    directory = agents_directory(space)
    if directory is None:
        raise FileNotFoundError("the workspace has no store directory")
    for tries_left in reversed(range(_TRIES_MAX)):
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        try:
            here = open_directory(directory)
            try:
                if os.geteuid() == 0:
                    os.fchown(here, *space.owner)
                return create(directory, here)
            finally:
                os.close(here)
        except FileNotFoundError:
            if not tries_left:
                raise
    raise AssertionError("the last try returns or raises")


def remove_agents_directory(directory: Path) -> None:
    """Removes the directory if it is empty."""
    with suppress(OSError):
        directory.rmdir()


def _files(space: Workspace, prefix: str = _CLAIMS) -> list[Path]:
    directory = agents_directory(space)
    if directory is None:
        return []
    try:
        here = open_directory(directory)
    except OSError:
        return []  # it does not exist, or is not a directory
    try:
        names = os.listdir(here)  # noqa: PTH208  (it is a descriptor)
    finally:
        os.close(here)
    return sorted(directory / name for name in names if name.startswith(prefix))


def _unlocked(path: Path) -> set[tuple[int, str]] | None:
    """Returns the leases in a file whose process has died; None if the process is alive."""
    leases: set[tuple[int, str]] = set()
    with _locked(path) as file:
        if file is None:
            return None
        text = os.read(file, os.fstat(file).st_size).decode("utf-8", "replace")
        for line in text.splitlines(keepends=True):
            number, _, name = line[1:].rstrip("\n").partition(" ")
            if not line.endswith("\n") or not number.isdigit():
                continue  # an incomplete line
            (leases.add if line[0] == "+" else leases.discard)((int(number), name))
    return leases


@contextmanager
def _locked(path: Path, flags: int = os.O_RDONLY) -> Iterator[int | None]:
    """Yields the file, exclusively locked; None if another process has locked it."""
    try:
        file = open_file(path, flags)
    except OSError:
        yield None  # removed meanwhile, not readable, or not a regular file
        return
    try:
        yield file if flock.try_lock(file) else None
    finally:
        os.close(file)
