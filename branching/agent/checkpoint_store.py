"""Checkpoints in the database beside the BranchFS store: they survive the process."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Any

from branching.agent.checkpoint import MAX_CHECKPOINTS, REWINDING, Checkpoint, TreeMark
from branching.agent.database import Database, place_of_database
from branching.fs import Workspace

_COLUMNS = "id, label, created, turn, history, has_tree, branch, archive, commit_id"
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS checkpoints (number INTEGER PRIMARY KEY AUTOINCREMENT,"
    " id TEXT UNIQUE NOT NULL, label TEXT NOT NULL, created TEXT NOT NULL, turn INTEGER NOT NULL,"
    " history BLOB NOT NULL, has_tree INTEGER NOT NULL, branch TEXT, archive BLOB,"
    " commit_id INTEGER);"
)


class SQLiteCheckpointStore:
    """Keeps the newest checkpoints of each place. Safe from any thread and several processes."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_checkpoints: int = MAX_CHECKPOINTS,
        *,
        owner: tuple[int, int] | None = None,
    ) -> None:
        """Opens or creates the file. Raises ForkStoreError if that fails or it is invalid."""
        self._most = max_checkpoints
        self._database = Database(Path(path), _SCHEMA, owner=owner)

    @staticmethod
    def beside(
        workspace: Workspace, max_checkpoints: int = MAX_CHECKPOINTS
    ) -> SQLiteCheckpointStore:
        """Opens the one of a workspace."""
        path = place_of_database(workspace)
        return SQLiteCheckpointStore(path, max_checkpoints, owner=workspace.owner)

    def close(self) -> None:
        self._database.close()

    def save(self, checkpoint: Checkpoint) -> None:
        tree = checkpoint.tree or TreeMark()
        row = (
            checkpoint.id,
            checkpoint.label,
            checkpoint.created_at.isoformat(),
            checkpoint.turn,
            checkpoint.history,
            checkpoint.tree is not None,
            tree.branch,
            tree.archive,
            tree.commit_id,
        )
        with self._database.writing() as database:
            database.execute(
                f"INSERT OR REPLACE INTO checkpoints ({_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?)", row
            )
            database.execute(
                "DELETE FROM checkpoints WHERE branch IS ? AND number NOT IN (SELECT number"
                " FROM checkpoints WHERE branch IS ? ORDER BY number DESC LIMIT ?)",
                (tree.branch, tree.branch, self._most),
            )

    def get(self, checkpoint_id: str) -> Checkpoint | None:
        return next(iter(self._found("WHERE id = ?", checkpoint_id)), None)

    def newest(self, branch: str | None) -> Checkpoint | None:
        where = "WHERE branch IS ? ORDER BY number DESC LIMIT 1"
        return next(iter(self._found(where, branch)), None)

    def list_all(self) -> list[Checkpoint]:
        return self._found("ORDER BY number")

    def remove(self, checkpoint_id: str) -> None:
        with self._database.writing() as database:
            database.execute("DELETE FROM checkpoints WHERE id = ?", (checkpoint_id,))

    def prune(self, kept: set[str | None], branches: set[str]) -> int:
        """Forgets all but the `kept`, those of these branches, and what a rewind needs that was cut
        off; gives the room back. Returns how many there were."""
        with self._database.writing() as database:
            rows = database.execute("SELECT id, label, branch FROM checkpoints").fetchall()
            gone = [
                (name,)
                for name, label, branch in rows
                if name not in kept and branch not in branches and not label.startswith(REWINDING)
            ]
            database.executemany("DELETE FROM checkpoints WHERE id = ?", gone)
        self._database.shrink()
        return len(gone)

    def _found(self, where: str, *values: str | None) -> list[Checkpoint]:
        with self._database.reading() as database:
            rows = database.execute(f"SELECT {_COLUMNS} FROM checkpoints {where}", values)
            return [_loaded(*row) for row in rows.fetchall()]


def _loaded(
    name: str,
    label: str,
    created: str,
    turn: int,
    history: Any,
    has_tree: int,
    branch: str | None,
    archive: Any,
    commit_id: int | None,
) -> Checkpoint:
    tree = TreeMark(
        branch=branch, archive=None if archive is None else bytes(archive), commit_id=commit_id
    )
    return Checkpoint(
        id=name,
        label=label,
        created_at=datetime.fromisoformat(created),
        turn=turn,
        history=bytes(history),
        tree=tree if has_tree else None,
    )
