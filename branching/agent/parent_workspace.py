"""Where a parent works: main, or a branch, as something that can be forked, marked and restored.

A directory with open branches is read-only. While others have branches open, the parent therefore
works in a branch of its own, which `land` commits:

    place                    main, or the branch that the coordinator was given
    ├── x                    a branch of somebody else
    └── agent-run-1a2b3c4d   where the parent works, until `land`

All of it blocks; the coordinator calls it in a thread.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryFile

from branching.agent.checkpoint import TreeMark
from branching.agent.copy_paths import TreeCopier
from branching.errors import (
    BranchError,
    BranchingError,
    BranchNotFoundError,
    CommitError,
    ConflictError,
)
from branching.fs import Branch, Change, Workspace
from branching.fs.backend import MAIN_ID, Policy

COARSE_CLOCK = 5
"""CLOCK_REALTIME_COARSE: what file systems stamp changes with. It ticks every few milliseconds."""
_TICK_SECONDS = 0.001
OWN_BRANCH = "agent-run-"
"""How the names of branches begin in which a parent works beside those of others."""
HISTORY_COMMITS = 10
"""So many commits can be undone, unless the mount says otherwise."""


class ParentWorkspace:
    """The workspace, and the branch in it that is the parent's; no branch is main."""

    def __init__(self, place: Workspace | Branch) -> None:
        place.check_call(is_compared=True)
        self._is_ours = isinstance(place, Branch)
        self.workspace = Workspace(place.path) if isinstance(place, Branch) else place
        self.branch: Branch | None = None
        if isinstance(place, Branch):
            self.branch = place
        elif place.branch_path != "/main":
            self.branch = place.reopen(place.branch_path.rpartition("/")[2])
        self._given = (self.workspace, self.branch)
        self._own: Branch | None = None

    @property
    def path(self) -> Path:
        return self.workspace.path

    @property
    def policy(self) -> Policy:
        """What our commits mean for branches that are not the fork's: they stay live."""
        return "snapshot"

    @property
    def name(self) -> str | None:
        return None if self.branch is None else self.branch.name

    def close(self) -> None:
        if self._is_ours:
            self._given[0].close()

    @property
    def is_beside(self) -> bool:
        """Whether the parent works in a branch of its own."""
        return self._own is not None

    def make_writable(self) -> list[ConflictError]:
        """Moves into a branch of its own if others have open branches of the place.

        If another commit made that branch stale, it is landed and another one is created.

        Returns:
            Conflicts that kept it from landing; see `land`.

        Raises:
            BranchingError: The branches cannot be listed, or the branch cannot be created.
        """
        workspace, branch = self._given
        records = workspace.branches()
        conflicts = []
        if self._own is not None:
            name = self._own.name
            if any(each.name == name and each.state == "live" for each in records):
                return []
            if any(each.name == name for each in records):
                conflicts = self.land()
            else:
                self._work_in(None)  # somebody has committed or aborted it
            records = workspace.branches()
        place = MAIN_ID
        if branch is not None:
            place = next((each.id for each in records if each.name == branch.name), MAIN_ID)
        if any(each.parent == place and each.state == "live" for each in records):
            self._work_in(self.create(f"{OWN_BRANCH}{secrets.token_hex(4)}"))
        return conflicts

    def return_to(self, name: str) -> None:
        """Works in the branch of that name again, which a dead process had for itself."""
        if name.startswith(OWN_BRANCH) and self.branch is None:
            self._work_in(self._given[0].reopen(name))

    def land(self) -> list[ConflictError]:
        """Commits the branch of its own, if there is one, and works in the place again.

        Other branches stay live. A stale branch is rebased.

        Returns:
            The conflict with changes of others, if there is one: then nothing was committed, and
            the branch stays open under its name.

        Raises:
            BranchingError: The commit was refused for another reason. The parent works on in it.
        """
        own = self._own
        if own is None:
            return []
        try:
            own.commit(policy=self.policy, rebase=True)
        except ConflictError as error:
            self._work_in(None)
            return [_kept(own, error)]
        self._work_in(None)
        return []

    def _work_in(self, own: Branch | None) -> None:
        if self._own is not None:
            self.workspace.close()
        self._own = own
        self.workspace, self.branch = self._given
        if own is not None:
            self.workspace, self.branch = Workspace(own.path), own

    def create(self, name: str) -> Branch:
        """Creates a child branch that only we end. Raises MountError if that fails."""
        return self.workspace.branch(name, None, None).__enter__()

    def find(self, name: str | None) -> Branch | None:
        """Returns the open branch of that name, if there is one."""
        if name is None:
            return None
        try:
            return self.workspace.reopen(name)
        except BranchNotFoundError:
            return None

    def drop(self, name: str | None) -> None:
        """Aborts the branch with this name, if it exists."""
        if (branch := self.find(name)) is not None:
            branch.abort()

    def now_ns(self) -> int:
        """Returns a moment: what the base's files undergo before it has a stamp that is not
        newer, what they undergo after we return has a newer one."""
        moment = time.time_ns()
        while time.clock_gettime_ns(COARSE_CLOCK) <= moment:
            time.sleep(_TICK_SECONDS)
        return moment

    def mark(self) -> TreeMark:
        """Keeps the files as they are now. BranchError where an archive cannot hold them."""
        if self.branch is None:
            standing = [commit.id for commit in self.workspace.history() if commit.undone is None]
            return TreeMark(commit_id=max(standing, default=0))
        with TemporaryFile() as file:
            self.branch.export(file)
            file.seek(0)
            return TreeMark(branch=self.branch.name, archive=file.read())

    def is_at(self, mark: TreeMark) -> bool:
        """Returns whether the files are in the marked state, as far as commits show.

        A branch changes atomically, so a branch that could not be restored is in that state.
        """
        return self.branch is not None or self.mark() == mark

    def restore(self, mark: TreeMark) -> list[Change]:
        """Brings the files back to the mark, all or nothing; returns what that changed.

        Of main the commits since are undone (or, on the way back, redone), one by one, each all or
        nothing: ConflictError when others have changed what one of them changed, CommitError when
        the history does not reach so far, or a branch is open. A branch gets its earlier content
        by a commit of a child.
        """
        if mark.branch != self.name:
            raise BranchError(
                f"the checkpoint is of {mark.branch or 'main'}, and this is {self.name or 'main'}"
            )
        if mark.archive is None:
            return self._move_to(mark.commit_id or 0)
        return self._restore_archive(mark.archive)

    def _move_to(self, commit_id: int) -> list[Change]:
        """Undoes, or redoes, until this commit is the last one that stands."""
        changes: list[Change] = []
        done: list[Callable[[], object]] = []
        known = [entry.id for entry in self.workspace.history()]
        # The state before the first commit of a full history is unknown.
        reaches = commit_id in known if commit_id else len(known) < HISTORY_COMMITS
        while True:
            entries = self.workspace.history()
            last = max((entry.id for entry in entries if entry.undone is None), default=0)
            if last == commit_id:
                return changes
            if not reaches:
                raise CommitError(
                    (
                        "the files were not changed: the history of commits does not reach that "
                        "far back"
                    ),
                    hint="mount with a longer history: branchfs mount --history N",
                )
            is_back = last > commit_id
            try:
                changes += (self.workspace.undo if is_back else self.workspace.redo)().changes
            except BranchingError:
                for again in done:
                    again()
                raise
            done.append(self.workspace.redo if is_back else self.workspace.undo)

    def _restore_archive(self, archive: bytes) -> list[Change]:
        assert self.branch is not None, "marks with an archive are of branches"
        earlier_name, stage_name = f"{self.branch.name}.earlier", f"{self.branch.name}.restore"
        for cut_off in (stage_name, earlier_name):
            self.drop(cut_off)  # a process died in it
        outer = Workspace(self.path.parent if self.path.parent.exists() else self.path)
        try:
            with TemporaryFile() as file:
                file.write(archive)
                file.seek(0)
                # It is only copied from: the commit of the stage finds conflicts.
                earlier = outer.load(earlier_name, file, force=True)
            try:
                stage = self.create(stage_name)
                try:
                    paths = _paths(self.branch.diff()) | _paths(earlier.diff())
                    copied = TreeCopier(earlier.path, stage.path)
                    for path in sorted(paths, reverse=True):
                        copied.clear(path)
                    for path in sorted(paths):
                        copied.make(path)
                    return stage.commit(policy=self.policy)
                except BaseException:
                    stage.abort()
                    raise
            finally:
                earlier.abort()
        finally:
            outer.close()


def _kept(own: Branch, error: ConflictError) -> ConflictError:
    paths = ", ".join(error.paths) or "the same files"
    return ConflictError(
        f"the agent's changes were not committed, because others changed {paths} meanwhile: they "
        f"are kept in branch {own.name}",
        hint=f"branching diff {own.name} shows them; commit it with --rebase and --force (its "
        "version) or --skip (the others')",
        paths=error.paths,
        branch=own.name,
    )


def _paths(changes: Sequence[Change]) -> set[str]:
    paths = {change.path for change in changes}
    return paths | {change.origin for change in changes if change.origin is not None}
