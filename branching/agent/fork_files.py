"""The branches of an open fork, and the end of the fork by a merge or an abort.

    place                   the forked workspace or branch; frozen, because it has children
    ├── <fork>.parent       the branch in which the parent continues
    │   └── <fork>.merge    exists during a merge: the winner's changes on top of the parent's
    └── <fork>-<label>      one for each branch of the fork

The place does not change until a single commit into it completes the merge. If the parent changed
nothing and all changes of the winner are merged, the winner's branch is committed, which moves its
files. Otherwise the selected changes of the winner are copied into the parent's branch, which is
then committed. A refused merge can be repeated; changes that were copied already are skipped. If
the final commit was refused because of a concurrent change, the merge can only be repeated.

All methods block. One thread may use it at a time, which the coordinator's lock ensures. Only
`record_originals` may run concurrently.
"""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from branching.agent.changed_paths import touched
from branching.agent.errors import MergeConflictError
from branching.agent.fingerprint import identity
from branching.agent.merge import Plan, Sides, fill, is_newer, make_plan
from branching.agent.parent_workspace import ParentWorkspace
from branching.agent.types import FlushError, FlushReport, MergeOptions
from branching.errors import BranchingError, BranchStaleError, CommitError, ConflictError
from branching.fs import Branch, Change
from branching.fs.confined_dir import ConfinedDir

ORIGINALS_MAX = 10_000
ORIGINAL_BYTES_MAX = 16 << 20
"""Larger files are not read: any later change of them in the base directory is a conflict."""

REFUSED_MAX = 100
"""A merge with `atomic=False` leaves out at most so many paths: each takes a commit to find."""

Decide = Callable[[str | None], None]
"""Called with the branch before the commit that completes the merge; with None if it failed."""


@dataclass(frozen=True, kw_only=True)
class Names:
    """What the fork's own branches are called in the workspace."""

    parent: str
    stage: str

    @staticmethod
    def of(fork_id: str) -> Names:
        return Names(parent=f"{fork_id}.parent", stage=f"{fork_id}.merge")


@dataclass(frozen=True, kw_only=True)
class _Droppable:
    """The winner's paths that a merge with `atomic=False` leaves out if they are refused."""

    winners: frozenset[str]
    parents: frozenset[str]
    """The paths that the parent changed, which are never left out."""

    @classmethod
    def of(cls, plan: Plan, parents: frozenset[str], options: MergeOptions) -> _Droppable | None:
        """Returns what a merge may leave out; None for nothing."""
        if options.atomic:
            return None
        return cls(winners=frozenset({*plan.winners, *plan.texts}), parents=parents)

    def hit_by(self, error: CommitError, refused: Sequence[FlushError]) -> list[FlushError]:
        """Returns the paths that the file system refused by this error; [] if it must be raised.

        A directory that is refused takes with it what is below.
        """
        if isinstance(error, ConflictError) or len(refused) >= REFUSED_MAX:
            return []
        known = {each.path for each in refused}
        hit = {
            path
            for path in self.winners | self.parents
            for named in (*error.paths, error.path)
            if named is not None and (path == named or path.startswith(f"{named}/"))
        }
        if known | hit >= self.winners | self.parents or hit & self.parents:
            return []  # nothing would be merged, or the parent's work would be lost
        return [
            FlushError(path=path, op="write", message=error.message) for path in sorted(hit - known)
        ]


class ForkFiles:
    """The branches of a fork that has files."""

    def __init__(
        self,
        place: ParentWorkspace,
        names: Names,
        *,
        parent: Branch,
        forked_ns: int,
        is_stuck: bool = False,
    ) -> None:
        self.place = place
        self.names = names
        self.parent = parent
        self.forked_ns = forked_ns
        self._is_stuck = is_stuck
        """The winner's part is in the parent's branch, and others kept that from landing."""
        self._originals: dict[str, str] = {}
        self._recording = threading.Lock()

    @property
    def base(self) -> ConfinedDir:
        """The files as they were at the fork."""
        return ConfinedDir(self.place.path, self.place.workspace.owner)

    def tree(self, branch: Branch) -> ConfinedDir:
        return ConfinedDir(branch.path, self.place.workspace.owner)

    def record_originals(self, branches: Iterable[Branch]) -> None:
        """Records the content of the base directory at the paths that branches have changed.

        A merge compares it with the content then, so that changes of only the times, mode or links
        of a file are no conflict. Reads each of these files once.

        Raises:
            OSError: A file cannot be read.
            BranchingError: The changes of a branch cannot be listed.
        """
        directory = self._directory
        if directory is None:
            return
        with self._recording:
            base = self.base
            outside = base.beside(directory)
            for branch in branches:
                for path in touched(branch.diff(), base, self.tree(branch)):
                    if path in self._originals or len(self._originals) >= ORIGINALS_MAX:
                        continue
                    found = outside.lstat(path)
                    if found is None or found.st_size > ORIGINAL_BYTES_MAX:
                        continue
                    original = identity(outside, path)
                    if not is_newer(path, directory, self.forked_ns, base):
                        self._originals[path] = original

    def parent_touched(self) -> frozenset[str]:
        """Returns what the parent has changed since the fork."""
        return frozenset(touched(self.parent.diff(), self.base, self.tree(self.parent)))

    def merge(self, winner: Branch, options: MergeOptions, decide: Decide) -> FlushReport:
        """Commits the winner's and the parent's changes. The losers' branches stay for the caller.

        Raises:
            MergeConflictError: The changes conflict. Nothing was changed, and the fork stays open.
            BranchingError: A commit was refused. Nothing was changed, and the fork stays open.
        """
        plan = self.refuse_conflicts(winner, options)
        parents = self.parent_touched()
        if plan.is_whole and not parents:
            droppable = _Droppable.of(plan, parents, options)
            changes, refused = self._commit(winner, decide, droppable=droppable)
            return report_of(changes, plan, refused)
        return self._land_part(winner, plan, options, decide)

    def refuse_conflicts(self, winner: Branch, options: MergeOptions) -> Plan:
        """Plans the merge; raises MergeConflictError where `options` want no conflicts."""
        plan = self.plan(winner, options)
        if plan.conflicts and options.on_conflict == "fail":
            raise MergeConflictError(
                (
                    f"nothing was merged: the workspace also changed {_some(plan.conflicts)} "
                    "since the fork"
                ),
                hint='choose on_conflict "keep", "theirs" or "merge3", or exclude these paths',
                paths=plan.conflicts,
            )
        return plan

    def plan(self, winner: Branch, options: MergeOptions) -> Plan:
        """Finds out what a merge would do, and does nothing. BranchStaleError when another branch
        was committed past the fork.
        """
        base, theirs = self.base, self.tree(winner)
        try:
            return make_plan(
                Sides(
                    base=base,
                    parent=self.tree(self.parent),
                    winner=theirs,
                    winner_touched=frozenset(touched(winner.diff(), base, theirs)),
                    parent_touched=self.parent_touched(),
                    drifted=self._drifted(winner),
                    directory=self._directory,
                    forked_ns=self.forked_ns,
                    originals=dict(self._originals),
                ),
                options,
            )
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            raise BranchStaleError(
                "nothing was merged: another branch of the workspace was committed since the fork",
                hint=(
                    'abort the fork; if others commit concurrently, mount with policy="snapshot"'
                ),
                branch=winner.name,
            ) from error

    def land_parent(self, options: MergeOptions, decide: Decide) -> None:
        """Commits the parent's changes since the fork into the place, and closes its branch.

        Raises:
            ConflictError: Others changed the same files of the base. The branch stays open.
        """
        if self._is_stuck:
            raise ConflictError(
                (
                    "files changed in the workspace while the merge was completed: only the "
                    "merged files can be committed"
                ),
                hint='merge the same branch again, with own="skip" to keep theirs, or own="force"',
            )
        if self.parent.diff():
            self._commit(self.parent, decide, options)
        else:
            decide(self.parent.name)
            self.parent.abort()

    def drop(self, *branches: Branch | None) -> list[str]:
        """Aborts branches of the fork; returns what could not be dropped."""
        left = []
        for branch in branches:
            try:
                if branch is not None and branch.is_open:
                    branch.abort()
            except BranchingError as error:
                left.append(error.message)
        return left

    def _land_part(
        self,
        winner: Branch,
        plan: Plan,
        options: MergeOptions,
        decide: Decide,
    ) -> FlushReport:
        """Copies the selected changes of the winner into the parent's branch, and commits it."""
        droppable = _Droppable.of(plan, self.parent_touched(), options)
        # Before anything is done: would it land?
        force, skip = _own(options)
        self.parent.commit(policy=self.place.policy, dry_run=True, force=force, skip=skip)
        stage = self.parent.branch(self.names.stage, None, None).__enter__()
        try:
            failed = fill(stage, winner, plan)
            if failed and options.atomic:
                raise CommitError(
                    f"nothing was merged: {failed[0].path}: {failed[0].message}",
                    hint="atomic=False merges what can be merged",
                    paths=tuple(error.path for error in failed),
                )
            # Now the branch knows what it replaces, and a commit refuses what changes from here on.
            self._refuse_news(self.plan(winner, options), plan)
            changes = stage.commit()
        except BaseException:
            stage.abort()
            raise
        self._is_stuck = True
        landed, refused = self._commit(self.parent, decide, options, droppable)
        self._is_stuck = False
        out = {error.path for error in refused}
        changes = [change for change in changes if change.path not in out]
        return report_of(changes, plan, [*failed, *refused], landed)

    def _commit(
        self,
        carrier: Branch,
        decide: Decide,
        options: MergeOptions | None = None,
        droppable: _Droppable | None = None,
    ) -> tuple[list[Change], list[FlushError]]:
        """Commits what decides the merge.

        Args:
            carrier: The branch to commit.
            decide: Called before the commit.
            options: Given for the parent's branch.
            droppable: The paths that are left out if the file system refuses them.

        Returns:
            The changes, and what was refused.
        """
        decide(carrier.name)
        force, skip = _own(options)
        refused: list[FlushError] = []
        try:
            while True:
                try:
                    changes = carrier.commit(
                        policy=self.place.policy,
                        force=force,
                        skip=skip,
                        exclude=[_exact_glob(error.path) for error in refused],
                        drop_rest=True,
                    )
                    return changes, refused
                except CommitError as error:
                    more = [] if droppable is None else droppable.hit_by(error, refused)
                    if not more:
                        raise
                    refused += more
        except BaseException:
            if not self._is_stuck:
                decide(None)
            raise

    def _drifted(self, winner: Branch) -> frozenset[str]:
        """Returns what others changed, or deleted, of the files that the winner has replaced."""
        if self._directory is None:
            return frozenset()
        try:
            winner.commit(policy=self.place.policy, dry_run=True)
        except ConflictError as error:
            return frozenset(error.paths)
        except CommitError:
            pass  # the commit reports it
        return frozenset()

    def _refuse_news(self, now: Plan, then: Plan) -> None:
        if news := sorted({*now.conflicts}.difference(then.conflicts)):
            raise ConflictError(
                f"nothing was merged: the workspace changed {_some(tuple(news))} during the merge",
                hint="the fork is open: merge again",
                paths=tuple(news),
            )

    @property
    def _directory(self) -> Path | None:
        return self.place.workspace.base if self.place.branch is None else None


def report_of(
    changes: Sequence[Change],
    plan: Plan | None = None,
    errors: Sequence[FlushError] = (),
    landed: Sequence[Change] | None = None,
) -> FlushReport:
    """Reports what a merge changed.

    `landed` are the changes of the commit that decided it, if `changes` were first committed into
    another branch.
    """
    there = {change.path for change in changes if change.change != "deleted"}
    files = {
        change.path
        for change in changes
        if change.path in there and change.kind != "directory" and change.path != "."
    }
    gone = {
        change.path
        for change in changes
        if change.change == "deleted" and change.kind != "directory"
    } | {change.origin for change in changes if change.origin and change.kind != "directory"}
    return FlushReport(
        applied_paths=tuple(sorted(files)),
        applied_changes=len(changes),
        conflicts=() if plan is None else plan.conflicts,
        errors=tuple(errors),
        deleted_paths=tuple(sorted(gone)),
        unselected=() if plan is None else plan.unselected,
        privileged=tuple(
            change for change in (changes if landed is None else landed) if change.privileges
        ),
    )


def _own(options: MergeOptions | None) -> tuple[bool, bool]:
    """Returns whether the parent's side is forced, and whether it is skipped."""
    own = "fail" if options is None else options.own
    return own == "force", own == "skip"


def _exact_glob(path: str) -> str:
    """Returns the pattern of a path filter that only this path matches."""
    return "/" + re.sub(r"([][*?{}\\])", r"\\\1", path)


def _some(paths: tuple[str, ...], most: int = 5) -> str:
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(paths[:most]) + more
