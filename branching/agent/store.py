"""Where the state of forks is kept: in memory, or in a database beside the BranchFS store.

    STORE/agents/forks.sqlite       forks(fork_id, created, state)      JSON, no conversations
                                    histories(fork_id, branch_id, data)

The directory belongs to the base's owner, as all of the store does, and goes with it: the store
stays while there is a branch, and an open fork has some. A conversation is written only when it is
another one than before.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from branching.agent.errors import ForkStoreError
from branching.agent.state import ForkState, KeptBranch
from branching.agent.types import (
    BranchIsolation,
    BranchSpec,
    BranchStatus,
    Budget,
    MergeStrategy,
    Usage,
)
from branching.fs import Workspace

DIRECTORY = "agents"
_PARENT = ""
"""The branch id under which the parent's conversation is kept."""
BUSY_SECONDS_MAX = 30.0
"""Another process may be writing."""


class InMemoryForkStateStore:
    """Keeps the state of forks in memory. Safe from any thread."""

    def __init__(self) -> None:
        self._kept: dict[str, ForkState] = {}
        self._lock = threading.Lock()

    def save(self, state: ForkState) -> None:
        with self._lock:
            self._kept[state.fork_id] = state

    def get(self, fork_id: str) -> ForkState | None:
        return self._kept.get(fork_id)

    def list_all(self) -> list[ForkState]:
        with self._lock:
            return sorted(self._kept.values(), key=lambda state: state.created_at)

    def remove(self, fork_id: str) -> None:
        with self._lock:
            self._kept.pop(fork_id, None)


class SQLiteForkStateStore:
    """Keeps the state of forks in a database file. Safe from any thread and several processes."""

    def __init__(self, path: Path, *, owner: tuple[int, int] | None = None) -> None:
        """Opens the file, or makes it. ForkStoreError if it is none of ours, or cannot be made."""
        self._path = path
        self._lock = threading.Lock()
        self._written: dict[tuple[str, str], bytes] = {}
        with self._told("opened"):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._database = sqlite3.connect(
                path, timeout=BUSY_SECONDS_MAX, check_same_thread=False, isolation_level=None
            )
            # A killed process loses nothing; a loss of power at most the last changes.
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.executescript(
                "CREATE TABLE IF NOT EXISTS forks"
                " (fork_id TEXT PRIMARY KEY, created TEXT NOT NULL, state TEXT NOT NULL);"
                "CREATE TABLE IF NOT EXISTS histories"
                " (fork_id TEXT, branch_id TEXT, data BLOB NOT NULL,"
                " PRIMARY KEY (fork_id, branch_id));"
            )
            if owner is not None and os.geteuid() == 0:
                for made in (path.parent, *path.parent.glob(f"{path.name}*")):
                    os.chown(made, *owner)

    @staticmethod
    def beside(workspace: Workspace) -> SQLiteForkStateStore:
        """Opens the one of a workspace."""
        if workspace.store is None:
            raise ForkStoreError(f"{workspace.root} keeps its branches in no directory")
        path = workspace.store / DIRECTORY / "forks.sqlite"
        return SQLiteForkStateStore(path, owner=workspace.owner)

    def close(self) -> None:
        self._database.close()

    def save(self, state: ForkState) -> None:
        histories = {branch.status.id: branch.history for branch in state.branches}
        histories[_PARENT] = state.parent_history
        with self._told("written"), self._lock, self._transaction() as database:
            database.execute(
                "INSERT INTO forks VALUES (?, ?, ?)"
                " ON CONFLICT (fork_id) DO UPDATE SET state = excluded.state",
                (state.fork_id, state.created_at.isoformat(), _dumped(state)),
            )
            changed = {
                key: data
                for branch_id, data in histories.items()
                if self._written.get(key := (state.fork_id, branch_id)) != data
            }
            database.executemany(
                "INSERT OR REPLACE INTO histories VALUES (?, ?, ?)",
                [(*key, data) for key, data in changed.items()],
            )
        self._written |= changed

    def get(self, fork_id: str) -> ForkState | None:
        with self._told("read"), self._lock:
            row = self._database.execute(
                "SELECT state FROM forks WHERE fork_id = ?", (fork_id,)
            ).fetchone()
            return None if row is None else self._loaded(row[0])

    def list_all(self) -> list[ForkState]:
        with self._told("read"), self._lock:
            rows = self._database.execute("SELECT state FROM forks ORDER BY created, rowid")
            return [self._loaded(state) for (state,) in rows.fetchall()]

    def remove(self, fork_id: str) -> None:
        with self._told("written"), self._lock, self._transaction() as database:
            for table in ("forks", "histories"):
                database.execute(f"DELETE FROM {table} WHERE fork_id = ?", (fork_id,))
            self._written = {key: data for key, data in self._written.items() if key[0] != fork_id}

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield self._database
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def _loaded(self, text: str) -> ForkState:
        state = _loaded(json.loads(text))
        rows = self._database.execute(
            "SELECT branch_id, data FROM histories WHERE fork_id = ?", (state.fork_id,)
        )
        histories = {branch_id: bytes(data) for branch_id, data in rows.fetchall()}
        return replace(
            state,
            parent_history=histories.get(_PARENT, b""),
            branches=tuple(
                replace(branch, history=histories.get(branch.status.id, b""))
                for branch in state.branches
            ),
        )

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


def _dumped(state: ForkState) -> str:
    def plain(value: Any) -> Any:
        if isinstance(value, datetime):
            return value.isoformat()
        raise TypeError(f"{type(value).__name__} cannot be kept")

    lean = replace(
        state,
        parent_history=b"",
        branches=tuple(replace(branch, history=b"") for branch in state.branches),
    )
    fields = asdict(lean)
    fields.pop("parent_history")
    for branch in fields["branches"]:
        branch.pop("history")
    return json.dumps(fields, default=plain)


def _loaded(fields: dict[str, Any]) -> ForkState:
    return ForkState(
        **{
            **fields,
            "created_at": datetime.fromisoformat(fields["created_at"]),
            "parent_history": b"",
            "budget": Budget(**fields["budget"]),
            "isolation": BranchIsolation(**fields["isolation"]),
            "strategy": MergeStrategy(**fields["strategy"]),
            "branches": tuple(_branch(branch) for branch in fields["branches"]),
        }
    )


def _branch(fields: dict[str, Any]) -> KeptBranch:
    spec, status = fields["spec"], fields["status"]
    return KeptBranch(
        spec=BranchSpec(**{**spec, "budget": Budget(**spec["budget"])}),
        status=BranchStatus(
            **{**status, "last_activity_at": datetime.fromisoformat(status["last_activity_at"])}
        ),
        files=fields["files"],
        usage=Usage(**fields["usage"]),
        blocked=tuple(fields["blocked"]),
    )
