"""Checkpoints: named places in the history of a workspace, to which it can be set back.

    STORE/logs/checkpoints                  a JSON object: by name, the checkpoint's fields

A checkpoint holds no files. It is the id of the last commit at that time, and restoring it undoes
the commits since, or redoes those that were undone. So it needs these commits in the history, and
does not cover changes that were made in the directory without a commit.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from branching._linux.flock import open_lock
from branching.errors import CommitError
from branching.fs.store_files import KEPT, open_directory, open_file, read

if TYPE_CHECKING:
    from branching.fs.backend import CommitRecord
    from branching.fs.workspace import Workspace

CHECKPOINTS = "checkpoints"
"""The file in the directory of the logs."""
_DRAFT = f"{CHECKPOINTS}.new"
CHECKPOINTS_MAX = 1000


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A named place in the history."""

    name: str
    commit: int
    """Id of the last commit at that time; 0 if the history was empty."""
    created: float
    """Unix time."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """What restoring a checkpoint does, in this order. One of the two is empty."""

    undo: list[CommitRecord]
    redo: list[CommitRecord]


class Checkpoints:
    """The checkpoints of an open workspace.

    Args:
        workspace: The workspace. It must be the whole one, not a branch.

    Raises:
        CommitError: The workspace has no history.
    """

    def __init__(self, workspace: Workspace) -> None:
        if workspace.store is None or workspace.branch_path != "/main":
            raise CommitError(
                "checkpoints need the history of the workspace, which a branch does not have",
                hint="run the command outside of the branch",
            )
        self._workspace = workspace
        self._logs = workspace.store / "logs"

    def all(self) -> list[Checkpoint]:
        """Returns the checkpoints, oldest first."""
        try:
            content = json.loads(read(self._logs / CHECKPOINTS))
            found = [Checkpoint(**fields) for fields in content.values()]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise CommitError(
                f"the checkpoints cannot be read: {error}", path=str(self._logs / CHECKPOINTS)
            ) from error
        return sorted(found, key=lambda checkpoint: checkpoint.created)

    def save(self, name: str) -> Checkpoint:
        """Saves the present place in the history under a name, also if the name exists.

        Raises:
            CommitError: The checkpoint cannot be written. Existing ones are unchanged.
        """
        done = [commit.id for commit in self._workspace.history() if commit.undone is None]
        # Of an emptied history, the last removed commit is the last one.
        last = done[-1] if done else self._workspace.newest_pruned()
        saved = Checkpoint(name=name, commit=last, created=time.time())
        try:
            with self._locked_logs() as directory:
                others = [each for each in self.all() if each.name != name]
                if len(others) >= CHECKPOINTS_MAX:
                    raise CommitError(
                        f"there are {CHECKPOINTS_MAX} checkpoints", hint="branching prune"
                    )
                self._write([*others, saved], directory)
        except OSError as error:
            raise CommitError(f"checkpoint {name!r} was not saved: {error.strerror}") from error
        return saved

    def route(self, name: str) -> Route:
        """Returns the commits to undo or to redo for a checkpoint.

        Raises:
            CommitError: There is no such checkpoint, or the history no longer leads to it.
        """
        checkpoint = next((each for each in self.all() if each.name == name), None)
        if checkpoint is None:
            raise CommitError(
                f"there is no checkpoint {name!r}", hint="branching save lists the checkpoints"
            )
        commits = self._workspace.history()
        place = next((each for each in commits if each.id == checkpoint.commit), None)
        if place is not None and place.undone is not None:
            undone = [each for each in commits if each.undone is not None]
            return Route(undo=[], redo=undone[: undone.index(place) + 1])
        pruned = self._workspace.newest_pruned()
        if pruned > checkpoint.commit:
            raise CommitError(
                f"checkpoint {name!r} is older than the history: commits since then can no longer "
                "be undone. Nothing was changed",
                hint="branching history lists the commits that can be undone",
            )
        if place is None and pruned != checkpoint.commit:
            raise CommitError(
                f"the last commit of checkpoint {name!r} was undone and replaced by later commits. "
                "Nothing was changed",
                hint="branching history lists the commits that can be undone",
            )
        later = [each for each in commits if each.id > checkpoint.commit and each.undone is None]
        return Route(undo=later[::-1], redo=[])

    @contextmanager
    def _locked_logs(self) -> Iterator[int]:
        """Opens the directory of the logs, which is locked while its checkpoints are changed."""

        def opened() -> int:
            with suppress(FileExistsError):
                self._logs.mkdir(mode=0o700)
            return open_directory(self._logs)

        directory = open_lock(opened, self._logs)
        try:
            yield directory
        finally:
            os.close(directory)

    def _write(self, checkpoints: list[Checkpoint], directory: int) -> None:
        content = json.dumps({each.name: asdict(each) for each in checkpoints}).encode()
        owner = self._workspace.owner if os.geteuid() == 0 else (-1, -1)
        os.fchown(directory, *owner)
        try:
            for name, text in ((KEPT, b""), (_DRAFT, content)):
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                with os.fdopen(open_file(name, flags, directory=directory), "wb") as file:
                    os.fchown(file.fileno(), *owner)
                    file.write(text)
            os.rename(_DRAFT, CHECKPOINTS, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with suppress(OSError):
                os.unlink(_DRAFT, dir_fd=directory)
            raise


def forget_checkpoints(logs: Path) -> None:
    """Removes all checkpoints. OSError if they cannot be removed."""
    try:
        directory = open_directory(logs)
    except FileNotFoundError:
        return
    try:
        with suppress(FileNotFoundError):
            os.unlink(CHECKPOINTS, dir_fd=directory)
    finally:
        os.close(directory)
