"""The database of the agents, beside the BranchFS store: an SQLite file, opened by each store.

    STORE/agents/forks.sqlite       forks and their conversations       (`fork_store`)
                                    checkpoints                         (`checkpoint_store`)

The directory belongs to the base's owner, as all of the store does, and goes with it: the store
stays while there is a branch or a commit that can be undone. Several processes may have it open; a
killed one loses nothing, a loss of power at most the last changes. What is deleted leaves room that
is used again, and `shrink` gives it back.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from branching.agent.errors import ForkStoreError
from branching.fs import Workspace
from branching.fs.store_files import check_plain, open_directory

DIRECTORY = "agents"
NAME = "forks.sqlite"
BUSY_SECONDS_MAX = 30.0
"""Another process may be writing."""
TRIES_MAX = 100
"""Another process may remove the empty directory before the database is created in it."""
CANNOT_OPEN = "unable to open database file"
"""SQLITE_CANTOPEN, whose number is not known before Python 3.11."""


def place_of_database(workspace: Workspace) -> Path:
    """Returns where a workspace has its database. ForkStoreError if it keeps no directory."""
    if workspace.store is None:
        raise ForkStoreError(f"{workspace.root} has no store directory")
    return workspace.store / DIRECTORY / NAME


class Database:
    """One connection. Safe from any thread; what fails is a ForkStoreError."""

    def __init__(self, path: Path, schema: str, *, owner: tuple[int, int] | None = None) -> None:
        """Opens or creates the file. Raises ForkStoreError if that fails or it is invalid."""
        self._path = path
        self._lock = threading.Lock()
        with self._told("opened"):
            for tries_left in reversed(range(TRIES_MAX)):
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                try:
                    self.connection = _connected(path, schema)
                    break
                except (FileNotFoundError, sqlite3.OperationalError) as error:
                    is_removed = isinstance(error, FileNotFoundError) or CANNOT_OPEN in str(error)
                    if not (is_removed and tries_left):
                        raise
            if owner is not None and os.geteuid() == 0:
                for made in (path.parent, *path.parent.glob(f"{path.name}*")):
                    os.chown(made, *owner, follow_symlinks=False)

    def close(self) -> None:
        self.connection.close()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        with self._told("read"), self._lock:
            yield self.connection

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it, or nothing."""
        with self._told("written"), self._lock:
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                yield self.connection
            except BaseException:
                self.connection.execute("ROLLBACK")
                raise
            self.connection.execute("COMMIT")

    def shrink(self) -> None:
        """Frees the disk space of deleted rows."""
        with self._told("written"), self._lock:
            self.connection.execute("VACUUM")
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    @contextmanager
    def _told(self, done: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, KeyError, TypeError, ValueError) as error:
            raise ForkStoreError(
                f"the state of forks cannot be {done}: {error}",
                hint="runs and files are as they were",
                path=str(self._path),
            ) from error


def _connected(path: Path, schema: str) -> sqlite3.Connection:
    _refuse_links(path)
    connection = sqlite3.connect(
        path, timeout=BUSY_SECONDS_MAX, check_same_thread=False, isolation_level=None
    )
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.executescript(schema)
    except BaseException:
        connection.close()
        raise
    return connection


def _refuse_links(path: Path) -> None:
    """Refuses a database that SQLite, which opens it by path, would reach outside the store.

    OSError for a symbolic link, a FIFO or a file with other hard links in the place of the
    directory, the database, or a file that SQLite keeps beside it.
    """
    parent = path.parent.parent.resolve() / path.parent.name
    os.close(open_directory(parent))
    for suffix in ("", "-journal", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            check_plain(parent / f"{path.name}{suffix}")
