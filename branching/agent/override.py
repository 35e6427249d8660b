"""An automatic merge taken back, and another branch of the fork merged instead.

Before the merge the place is marked, and the parent's branch and each loser are kept as archives in
temporary files; so this works in the process that merged, until the next fork. The other branch is
put on top of the parent's own work, and both land by one commit. All of it blocks.
"""

from __future__ import annotations

import warnings
from tempfile import TemporaryFile
from typing import IO

from branching.agent.checkpoint import TreeMark
from branching.agent.errors import ForkStateError, MergeConflictError
from branching.agent.fork import Fork
from branching.agent.open_fork import report_of
from branching.agent.place import Place
from branching.agent.runtime import BranchRuntime
from branching.agent.touched import touched
from branching.agent.types import FlushReport
from branching.errors import BranchingError, ConflictError
from branching.fs import Branch, Workspace

_PARENT = ""
"""Stands for the parent's branch among the ids of branches."""


class Override:
    """What it takes to change the outcome of one merge."""

    def __init__(self, fork: Fork, winner: BranchRuntime) -> None:
        self.fork_id = fork.fork_id
        self._fork = fork
        self._winner = winner
        self._archives: dict[str, IO[bytes]] = {}
        self._touched: dict[str, set[str]] = {}
        self._parents: frozenset[str] = frozenset()
        self._mark: TreeMark | None = None
        self._after: TreeMark | None = None

    def prepare(self) -> None:
        """The merge begins. BranchError if a branch cannot be kept: then nothing is merged."""
        files = self._fork.files
        assert files is not None, "a fork without files commits nothing"
        self.close()
        self._mark = files.place.mark()
        self._parents = files.parent_touched()
        self._archives[_PARENT] = _exported(files.parent)
        for branch in self._fork.branches.values():
            if branch.branch is None:
                continue
            tree = files.tree(branch.branch)
            self._touched[branch.id] = touched(branch.branch.diff(), files.base, tree)
            if branch is not self._winner:
                self._archives[branch.id] = _exported(branch.branch)

    def settle(self) -> None:
        """The winner was committed. Raises nothing: at worst there is no override."""
        if self._mark is None or self._fork.place is None:
            return
        try:
            self._after = self._fork.place.mark()
        except BranchingError as error:
            self.close()
            warnings.warn(f"this merge cannot be overridden: {error.message}", stacklevel=2)

    def take(self, branch: BranchRuntime) -> FlushReport:
        """Puts the files to what they were before the winner, and then to the branch's."""
        place, archive = self._fork.place, self._archives.get(branch.id)
        if branch is self._winner:
            raise ForkStateError(f"branch {branch.id} is what was merged")
        if place is None or self._mark is None:
            return FlushReport()
        if place.mark() != self._after:
            raise ConflictError("files were changed since the merge: it cannot be taken back")
        if archive is None:
            raise ForkStateError(f"branch {branch.id} has no files of its own")
        self._check(branch)
        place.restore(self._mark)
        try:
            return self._land(place, archive)
        except BaseException:
            assert self._after is not None, "it was compared above"
            place.restore(self._after)
            raise

    def _land(self, place: Place, archive: IO[bytes]) -> FlushReport:
        name = f"{self.fork_id}.override"
        parents = self._archives[_PARENT]
        parents.seek(0)
        archive.seek(0)
        own = place.workspace.load(name, parents)
        try:
            with Workspace(own.path) as inside:
                report = report_of(inside.load(f"{name}.branch", archive).commit())
            own.commit(policy=place.policy)
            return report
        except BaseException:
            own.abort()
            raise

    def close(self) -> None:
        """Gives the archives up."""
        for archive in self._archives.values():
            archive.close()
        self._archives.clear()

    def _check(self, branch: BranchRuntime) -> None:
        """Refuses what the parent, or somebody in the base, changed since the fork."""
        mine = self._touched[branch.id]
        others = mine & self._parents
        place, files = self._fork.place, self._fork.files
        if place is not None and place.branch is None and files is not None:
            for path in mine - self._touched[self._winner.id]:
                if files.is_newer_in_base(path):
                    others.add(path)
        if others:
            raise MergeConflictError(
                f"nothing was changed: others changed {len(others)} of the branch's paths",
                paths=tuple(sorted(others)),
            )


def _exported(branch: Branch) -> IO[bytes]:
    archive = TemporaryFile()  # noqa: SIM115  (it is kept)
    try:
        branch.export(archive)
    except BaseException:
        archive.close()
        raise
    return archive
