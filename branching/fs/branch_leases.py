"""Branches that are to go with the process that made them, also when it is killed.

    STORE/agents/claims-9f3c2a1b    one a process, locked by it: a line for each branch that it made
                                    `+ID NAME`, or let go of `-ID NAME`
    STORE/agents/leases-9f3c2a1b    the same of a program that uses the library

Claims are an MCP server's: the next server drops what a killed one left. Leases are made for
branches that a `with` block or a pattern ends (`lease`): whoever opens the workspace next drops
what a killed program left (`drop_leased`). A program that ends by itself gives its leases up.

The kernel takes a lock away with its process, however that dies: a file that is not locked tells of
branches that were left. A line is written after its branch is made, so a process that is killed in
between leaves a branch that nobody claims; it is never the other way round.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from branching.errors import BranchNotFoundError
from branching.fs.backend import Backend, BranchRecord
from branching.fs.store_files import open_directory, open_file

if TYPE_CHECKING:
    from branching.fs.workspace import Workspace

_DIRECTORY = "agents"
_CLAIMS = "claims-"
_LEASES = "leases-"
_TRIES_MAX = 100
"""The directory may be removed by another process before there is a file in it."""


class BranchLeases:
    """Those of one process. The file is made with the first claim, and removed by `close`. Safe
    from any thread."""

    def __init__(self, space: Workspace | Backend, prefix: str = _CLAIMS) -> None:
        self._space = space
        self._prefix = prefix
        self._lock = threading.Lock()  # guards the next two
        self._path: Path | None = None
        self._file: int | None = None

    def add(self, record: BranchRecord) -> None:
        """Claims a branch. OSError if that cannot be written down."""
        self._write(f"+{record.id} {record.name}\n")

    def drop(self, record: BranchRecord) -> None:
        """Gives a claim up: the branch stays."""
        self._write(f"-{record.id} {record.name}\n")

    def close(self) -> None:
        """Gives all claims up."""
        if self._path is not None and self._file is not None:
            self._path.unlink(missing_ok=True)
            remove_agents_directory(self._path.parent)
            os.close(self._file)
            self._path = self._file = None

    def abandon(self) -> None:
        """Lets go of the file in a forked process: it is the parent's."""
        if self._file is not None:
            os.close(self._file)
            self._path = self._file = None

    def _write(self, line: str) -> None:
        with self._lock:
            for tries_left in reversed(range(_TRIES_MAX)):
                if self._file is not None:
                    break
                try:
                    self._path, self._file = self._made()
                except FileNotFoundError:
                    if not tries_left:
                        raise
            assert self._file is not None, "the last try has raised"
            os.write(self._file, line.encode())

    def _made(self) -> tuple[Path, int]:
        directory = agents_directory(self._space)
        if directory is None:
            raise FileNotFoundError("the workspace keeps its branches in no directory")
        uid, gid = self._space.owner
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        name = f"{self._prefix}{secrets.token_hex(4)}"
        here = open_directory(directory)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
            file = open_file(f".{name}", flags, directory=here)
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.geteuid() == 0:
                os.fchown(here, uid, gid)
                os.fchown(file, uid, gid)
            # Nobody finds it before it is locked.
            os.rename(f".{name}", name, src_dir_fd=here, dst_dir_fd=here)
        finally:
            os.close(here)
        return directory / name, file


class _Leases:
    """The claims of this process as a program, by store. The file of a store goes with the last
    branch, so that the store can go when the workspace is closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._is_registered = False
        self._claims: dict[Path, BranchLeases] = {}
        self._open: dict[Path, set[int]] = {}

    def add(self, backend: Backend, store: Path, record: BranchRecord) -> None:
        with self._lock:
            if not self._is_registered:
                # Not before: what is registered last is done first, and the workspace, which is
                # there by now, is unmounted at the exit, too.
                atexit.register(self.close)
                self._is_registered = True
            leases = self._claims.setdefault(store, BranchLeases(backend, _LEASES))
            leases.add(record)
            self._open.setdefault(store, set()).add(record.id)

    def drop(self, store: Path, record: BranchRecord) -> None:
        with self._lock:
            opened = self._open.get(store, set())
            if record.id not in opened:
                return
            opened.discard(record.id)
            if opened:
                self._claims[store].drop(record)
            else:
                self._claims.pop(store).close()

    def close(self) -> None:
        with self._lock:
            while self._claims:
                self._claims.popitem()[1].close()
            self._open.clear()

    def forget(self) -> None:
        """In a forked process: the branches are the parent's, and so is the lock."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        while self._claims:
            self._claims.popitem()[1].abandon()
        self._open.clear()


_leases = _Leases()
os.register_at_fork(after_in_child=_leases.forget)


def lease(backend: Backend, record: BranchRecord) -> None:
    """Has a branch dropped after this process if that is killed. The branch stays where that
    cannot be written down: the store is another user's."""
    if backend.store is not None:
        with suppress(OSError):
            _leases.add(backend, backend.store, record)


def end_lease(backend: Backend, record: BranchRecord) -> None:
    """Says that a branch has ended, or is to stay."""
    if backend.store is not None:
        with suppress(OSError):
            _leases.drop(backend.store, record)


def drop_leased(space: Workspace) -> list[BranchRecord]:
    """Aborts the branches that killed programs left, and returns which they were."""
    return drop_orphaned(space, _LEASES) if _files(space, _LEASES) else []


def orphaned_branches(
    space: Workspace, records: Sequence[BranchRecord] | None = None, prefix: str = _CLAIMS
) -> list[BranchRecord]:
    """Lists the open branches that were left by processes that are gone, the oldest first; of
    `records`, if they were listed already."""
    claimed = {claim for path in _files(space, prefix) for claim in _unlocked(path)}
    if not claimed:
        return []
    opened = space.branches() if records is None else records
    return [each for each in opened if (each.id, each.name) in claimed]


def release(space: Workspace, record: BranchRecord) -> None:
    """Has a branch that was left stay. OSError if that cannot be written down."""
    for path in _files(space):
        if (record.id, record.name) in _unlocked(path):
            with _locked(path, os.O_WRONLY | os.O_APPEND) as file:
                if file is not None:
                    os.write(file, f"-{record.id} {record.name}\n".encode())


def drop_orphaned(space: Workspace, prefix: str = _CLAIMS) -> list[BranchRecord]:
    """Aborts them; returns which they were. What an abort raises is raised.

    A branch stays as long as there is one below it that was not left.
    """
    opened = space.branches()
    found = orphaned_branches(space, opened, prefix)
    gone = {record.id for record in found}
    others = [record.branch_path for record in opened if record.id not in gone]
    dropped = [
        record
        for record in found
        if not any(path.startswith(f"{record.branch_path}/") for path in others)
    ]
    for record in reversed(dropped):  # children are younger than their parents
        with suppress(BranchNotFoundError):  # somebody else drops them too
            space.reopen(record.name).abort()
    for path in _files(space, prefix):
        leases = _unlocked(path)
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
    """Returns where processes say what they do in branches; None where there is no such place."""
    return None if space.store is None else space.store / _DIRECTORY


def remove_agents_directory(directory: Path) -> None:
    """Removes the directory unless there is something in it."""
    with suppress(OSError):
        directory.rmdir()


def _files(space: Workspace, prefix: str = _CLAIMS) -> list[Path]:
    directory = agents_directory(space)
    if directory is None:
        return []
    try:
        here = open_directory(directory)
    except OSError:
        return []  # none was made, or something else is in its place
    try:
        names = os.listdir(here)  # noqa: PTH208  (it is a descriptor)
    finally:
        os.close(here)
    return sorted(directory / name for name in names if name.startswith(prefix))


def _unlocked(path: Path) -> set[tuple[int, str]]:
    """Reads a file whose process is gone; nothing of one that is there."""
    leases: set[tuple[int, str]] = set()
    with _locked(path) as file:
        if file is None:
            return leases
        text = os.read(file, os.fstat(file).st_size).decode("utf-8", "replace")
        for line in text.splitlines(keepends=True):
            number, _, name = line[1:].rstrip("\n").partition(" ")
            if not line.endswith("\n") or not number.isdigit():
                continue  # it was cut off
            (leases.add if line[0] == "+" else leases.discard)((int(number), name))
    return leases


@contextmanager
def _locked(path: Path, flags: int = os.O_RDONLY) -> Iterator[int | None]:
    """Locks a file for the length of the `with`; None where its process lives, or others look."""
    try:
        file = open_file(path, flags)
    except OSError:
        yield None  # gone meanwhile, not ours to read, or something else in its place
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file
    except BlockingIOError:
        yield None
    finally:
        os.close(file)
