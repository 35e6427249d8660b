"""Branches that are to go with the process that made them, also when it is killed.

    STORE/agents/claims-9f3c2a1b    one a process, locked by it: a line for each branch that it made
                                    `+ID NAME`, or let go of `-ID NAME`

The kernel takes a lock away with its process, however that dies: a file that is not locked tells of
branches that were left. A line is written after its branch is made, so a process that is killed in
between leaves a branch that nobody claims; it is never the other way round.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from branching.errors import BranchNotFoundError
from branching.fs.backend import BranchRecord
from branching.fs.workspace import Workspace

_DIRECTORY = "agents"
_PREFIX = "claims-"


class Claims:
    """Those of one process. The file is made with the first claim, and removed by `close`. Safe
    from any thread."""

    def __init__(self, space: Workspace) -> None:
        self._space = space
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
            with suppress(OSError):  # others have something there
                self._path.parent.rmdir()
            os.close(self._file)
            self._path = self._file = None

    def _write(self, line: str) -> None:
        with self._lock:
            if self._file is None:
                self._path, self._file = self._made()
            os.write(self._file, line.encode())

    def _made(self) -> tuple[Path, int]:
        directory = _directory(self._space)
        if directory is None:
            raise FileNotFoundError("the workspace keeps its branches in no directory")
        uid, gid = self._space.owner
        if not directory.exists():
            directory.mkdir(mode=0o700)
            if os.geteuid() == 0:
                os.chown(directory, uid, gid)
        name = f"{_PREFIX}{secrets.token_hex(4)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        file = os.open(directory / f".{name}", flags, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.geteuid() == 0:
            os.fchown(file, uid, gid)
        # Nobody finds it before it is locked.
        return (directory / f".{name}").rename(directory / name), file


def left(space: Workspace, records: Sequence[BranchRecord] | None = None) -> list[BranchRecord]:
    """Lists the open branches that were left by processes that are gone, the oldest first; of
    `records`, if they were listed already."""
    claimed = {claim for path in _files(space) for claim in _unlocked(path)}
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


def drop_left(space: Workspace) -> list[BranchRecord]:
    """Aborts them; returns which they were. What an abort raises is raised."""
    found = left(space)
    for record in reversed(found):  # children are younger than their parents
        with suppress(BranchNotFoundError):  # somebody else drops them too
            space.reopen(record.name).abort()
    for path in _files(space):
        with _locked(path) as file:
            if file is not None:
                path.unlink(missing_ok=True)
    return found


def _directory(space: Workspace) -> Path | None:
    return None if space.store is None else space.store / _DIRECTORY


def _files(space: Workspace) -> list[Path]:
    directory = _directory(space)
    return [] if directory is None else sorted(directory.glob(f"{_PREFIX}*"))


def _unlocked(path: Path) -> set[tuple[int, str]]:
    """Reads a file whose process is gone; nothing of one that is there."""
    claims: set[tuple[int, str]] = set()
    with _locked(path) as file:
        if file is None:
            return claims
        text = os.read(file, os.fstat(file).st_size).decode("utf-8", "replace")
        for line in text.splitlines(keepends=True):
            number, _, name = line[1:].rstrip("\n").partition(" ")
            if not line.endswith("\n") or not number.isdigit():
                continue  # it was cut off
            (claims.add if line[0] == "+" else claims.discard)((int(number), name))
    return claims


@contextmanager
def _locked(path: Path, flags: int = os.O_RDONLY) -> Iterator[int | None]:
    """Locks a file for the length of the `with`; None where its process lives, or others look."""
    try:
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield None  # gone meanwhile, or not ours to read
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file
    except BlockingIOError:
        yield None
    finally:
        os.close(file)
