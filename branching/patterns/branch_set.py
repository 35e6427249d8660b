"""The branches of one call. They are forked from one parent and committed, kept or aborted.

With a setup, or a disk limit for all branches together, there is an intermediate branch. The others
are forked from it, the winner is merged into it, and it is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from branching.errors import BranchingError, CommitError, ConflictError, add_note
from branching.fs import Branch, Change, Workspace
from branching.runlog.run_controller import RunController

if TYPE_CHECKING:
    from branching.fs.backend import Policy
    from branching.process import CallLimits


class BranchSet:
    """The branches of one call. `clear` aborts those that are neither committed nor kept."""

    def __init__(
        self,
        parent: Workspace | Branch,
        name: Callable[[int | str], str],
        budget: CallLimits | None,
        *,
        is_between: bool,
        is_nested: bool = False,
        is_part: bool = False,
        policy: Policy | None = None,
        ends_with_process: bool = True,
    ) -> None:
        """With `is_between` all branches are forked from an intermediate branch.

        With the policy "snapshot", a commit leaves other branches of the parent live, and conflicts
        are detected by path, whichever was committed first. If the process is killed, the next
        program that opens the workspace drops the branches, unless `ends_with_process` is false.
        """
        self._ends_with_process = ends_with_process
        self._policy: Policy | None = policy
        self.forgotten: list[str] = []
        """Branch names of earlier commits that can no longer be undone."""
        self.commit_id: int | None = None
        """Id of the last commit in the history; None if it has no entry there."""
        self._parent = parent
        self._name = name
        self._disk_each = None if budget is None else budget.disk_each
        self._disk_together = None if budget is None else budget.disk_together
        self._is_between = is_between or self._disk_together is not None
        parent.check_call(is_nested=is_nested or self._is_between, is_part=is_part)
        self._controller = RunController.current()
        self._branches: list[Branch] = []  # children come after their parents
        self._kept: set[Branch] = set()
        self._announced: set[Branch] = set()
        """Branches whose changes were reported before a commit made them stale."""
        self.between: Branch | None = None
        """The intermediate branch; None if there is none or it is not created yet."""

    def open_between(self) -> Branch | None:
        """Creates and returns the intermediate branch; None if it exists or is not needed."""
        if not self._is_between or self.between is not None:
            return None
        self.between = self._parent.branch(
            self._name("setup"), on_success=None, on_error=None, disk_limit=self._disk_together
        )
        self._own(self.between)
        return self.between.__enter__()

    def branch(self, purpose: int | str, parent: Branch | None = None) -> Branch:
        """Returns a new branch that is not created yet."""
        origin = parent or self.between or self._parent
        branch = origin.branch(
            self._name(purpose), on_success=None, on_error=None, disk_limit=self._disk_each
        )
        self._own(branch)
        return branch

    def replace(self, planned: Branch, loaded: Branch) -> None:
        """Takes a branch that was loaded from an archive in the place of one that was planned."""
        self._branches[self._branches.index(planned)] = loaded

    def _own(self, branch: Branch) -> None:
        self._branches.append(branch)
        # In a controlled call, branches stay open if the process is killed; the run log lists them.
        branch.is_leased = self._ends_with_process and self._controller is None

    def merged(self, branch: Branch) -> Branch:
        """Commits the branch into the intermediate branch, if any. Returns the resulting branch."""
        if self.between is None:
            return branch
        self.commit(branch)
        return self.between

    def commit(
        self, branch: Branch, only: Sequence[str] = (), *, drop_rest: bool = False
    ) -> list[Change]:
        """Commits the branch and returns the changes.

        The branch is kept if the commit is refused but possible later, or if `only` leaves changed
        paths and `drop_rest` is not set.
        """
        self.drop_below(branch)
        self._announce_losers(branch)
        self._before_end(branch)
        try:
            is_any_first = self._policy == "snapshot"
            changes = branch.commit(
                only=only, drop_rest=drop_rest, policy=self._policy, rebase=is_any_first
            )
            if branch.remaining:
                self._kept.add(branch)
            self.forgotten += branch.forgotten
            self.commit_id = branch.commit_id
            return changes
        except CommitError as error:
            if not isinstance(error, ConflictError) or error.paths:
                self._kept.add(branch)
                if self.between is not None:
                    self._kept.add(self.between)  # aborting it would abort its child
                kept = f"the work is kept in branch {branch.name!r}"
                error.hint = f"{error.hint}; {kept}" if error.hint else kept
            raise

    def drop_below(self, branch: Branch) -> None:
        """Aborts the branches of this call that are nested in `branch`, before its commit.

        A branch with live children cannot be committed. The commit of a winner without changes
        does not make its siblings stale, so they must be aborted explicitly.
        """
        for other in self._branches[::-1]:
            if other.is_open and other.branch_path.startswith(f"{branch.branch_path}/"):
                self.drop(other)

    def keep(self, branch: Branch) -> None:
        """Leaves the branch open after the call."""
        self._kept.add(branch)

    def keep_all(self) -> None:
        """Leaves all open branches open after the call."""
        self._kept.update(self._branches)

    def drop(self, branch: Branch) -> None:
        """Aborts the branch now, unless it has ended or is to be kept."""
        if branch.is_open and not self._is_kept(branch):
            if branch not in self._announced:
                self._before_end(branch)
            branch.abort()

    def _announce_losers(self, winner: Branch) -> None:
        """Reports the branches that the commit of `winner` makes stale while they still show their
        own base. Afterwards their parent shows the winner's changes, and a patch of a loser would
        revert them.
        """
        if self._policy not in (None, "first-winner"):
            return  # they keep their snapshot
        for other in self._branches:
            is_above = winner.branch_path.startswith(f"{other.branch_path}/")
            if other is winner or is_above or not other.is_open or self._is_kept(other):
                continue
            self._before_end(other)
            self._announced.add(other)

    def _before_end(self, branch: Branch) -> None:
        if self._controller is not None:
            self._controller.before_end(branch)

    def clear(self, under_way: BaseException | None) -> None:
        """Drops all branches that are not kept.

        A failure is raised, or added as a note to `under_way`, the exception being handled.
        """
        failure: BranchingError | None = None
        for branch in self._branches[::-1]:
            try:
                self.drop(branch)
            except BranchingError as error:
                failure = failure or error
            branch.release()
        if failure is None:
            return
        if under_way is None:
            raise failure
        add_note(under_way, f"and a branch stays open: {failure}")

    def _is_kept(self, branch: Branch) -> bool:
        is_asked_for = self._controller is not None and self._controller.keeps(branch.name)
        return branch in self._kept or is_asked_for
