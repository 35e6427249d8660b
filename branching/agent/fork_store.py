"""Where the state of forks is kept: in memory, or in the database beside the BranchFS store.

    forks(fork_id, created, state)              JSON, no conversations
    histories(fork_id, branch_id, data)

An open fork has branches, so the store stays as long as it is open. A conversation is written only
when it is another one than before.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from branching.agent.database import Database, place_of_database
from branching.agent.fork_state import ForkState, KeptBranch
from branching.agent.types import (
    BranchIsolation,
    BranchSpec,
    BranchStatus,
    Budget,
    MergeStrategy,
    Usage,
)
from branching.fs import Workspace

_PARENT = ""
"""The branch id under which the parent's conversation is kept."""
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS forks"
    " (fork_id TEXT PRIMARY KEY, created TEXT NOT NULL, state TEXT NOT NULL);"
    "CREATE TABLE IF NOT EXISTS histories"
    " (fork_id TEXT, branch_id TEXT, data BLOB NOT NULL, PRIMARY KEY (fork_id, branch_id));"
)


class InMemoryForkStateStore:
    """Keeps the state of forks in memory. Safe from any thread."""

    home: Path | None = None

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

    def __init__(
        self, path: str | os.PathLike[str], *, owner: tuple[int, int] | None = None
    ) -> None:
        """Opens or creates the file. Raises ForkStoreError if that fails or it is invalid."""
        path = Path(path)
        self.home: Path | None = path.parent / "overrides"
        self._written: dict[tuple[str, str], bytes] = {}
        self._database = Database(path, _SCHEMA, owner=owner)

    @staticmethod
    def beside(workspace: Workspace) -> SQLiteForkStateStore:
        """Opens the one of a workspace."""
        return SQLiteForkStateStore(place_of_database(workspace), owner=workspace.owner)

    def close(self) -> None:
        self._database.close()

    def save(self, state: ForkState) -> None:
        histories = {branch.status.id: branch.history for branch in state.branches}
        histories[_PARENT] = state.parent_history
        with self._database.writing() as database:
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
        with self._database.reading() as database:
            row = database.execute(
                "SELECT state FROM forks WHERE fork_id = ?", (fork_id,)
            ).fetchone()
            return None if row is None else _with_histories(row[0], database)

    def list_all(self) -> list[ForkState]:
        with self._database.reading() as database:
            rows = database.execute("SELECT state FROM forks ORDER BY created, rowid").fetchall()
            return [_with_histories(state, database) for (state,) in rows]

    def remove(self, fork_id: str) -> None:
        with self._database.writing() as database:
            for table in ("forks", "histories"):
                database.execute(f"DELETE FROM {table} WHERE fork_id = ?", (fork_id,))
            self._written = {key: data for key, data in self._written.items() if key[0] != fork_id}


def _with_histories(text: str, database: sqlite3.Connection) -> ForkState:
    state = _loaded(json.loads(text))
    rows = database.execute(
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
