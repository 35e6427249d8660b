"""The SQLite database of the agents, opened several times and by several processes."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from branching.agent.checkpoint_store import SQLiteCheckpointStore
from branching.agent.database import Database
from branching.agent.errors import ForkStoreError
from branching.agent.fork_store import SQLiteForkStateStore

SCHEMA = "CREATE TABLE IF NOT EXISTS words (word TEXT)"
READ = f"""
import sys
from pathlib import Path
from branching.agent.checkpoint_store import SQLiteCheckpointStore
from branching.agent.database import Database

database = Database(Path(sys.argv[1]), {SCHEMA!r})
with database.reading() as connection:
    print(connection.execute("SELECT count(*) FROM words").fetchone()[0])
database.close()
"""


def test_a_second_connection_of_a_process_leaves_the_locks_of_the_first(tmp_path: Path) -> None:
    """Another process that finds no lock resets the shared memory of the first, which is mapped.

    The first process then dies of SIGBUS, or loses what it writes. Closing any descriptor of a file
    releases all locks that the process has on the file, so opening must not open it to look at it.
    """
    path = tmp_path / "store" / "forks.sqlite"
    path.parent.parent.mkdir(exist_ok=True)
    connections = [Database(path, SCHEMA) for _ in range(2)]
    shared_memory = path.with_name(f"{path.name}-shm").stat()
    for count, database in enumerate(connections, start=1):
        with database.writing() as connection:
            connection.execute("INSERT INTO words VALUES ('x')")
        read = [sys.executable, "-c", READ, str(path)]
        found = subprocess.run(read, capture_output=True, text=True, timeout=120, check=True)
        assert found.stdout == f"{count}\n"
        after = path.with_name(f"{path.name}-shm").stat()
        assert (after.st_ino, after.st_size) == (shared_memory.st_ino, shared_memory.st_size)
    for database in connections:
        database.close()


@pytest.mark.parametrize(
    ("module", "step"), [(os, "close"), (sqlite3, "connect")], ids=["checked", "created"]
)
def test_it_is_opened_although_another_process_removes_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, step: str
) -> None:
    """As the last holder of a lock in it does, as long as the directory is empty."""
    path = tmp_path / "agents" / "forks.sqlite"
    removed: list[str] = []
    original: Callable[..., Any] = getattr(module, step)

    def after_removal(*args: Any, **options: Any) -> Any:
        if not removed:
            path.parent.rmdir()
            removed.append(step)
        return original(*args, **options)

    monkeypatch.setattr(module, step, after_removal)
    database = Database(path, SCHEMA)
    monkeypatch.undo()
    assert removed == [step]
    with database.writing() as connection:
        connection.execute("INSERT INTO words VALUES ('x')")
    database.close()
    assert path.exists()


def test_a_database_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "agents" / "forks.sqlite"
    path.mkdir(parents=True)
    with pytest.raises(ForkStoreError, match="the state of forks cannot be opened"):
        Database(path, SCHEMA)


@pytest.mark.parametrize("store", [SQLiteForkStateStore, SQLiteCheckpointStore])
def test_a_store_takes_its_path_as_text_or_as_a_path(
    tmp_path: Path, store: Callable[..., SQLiteForkStateStore | SQLiteCheckpointStore]
) -> None:
    path = tmp_path / "agents" / "forks.sqlite"
    for given in (str(path), path):
        store(given).close()
    assert path.exists()
