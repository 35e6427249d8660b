"""The branches of one call: forked from one parent, committed, kept, or given up at its end.

Where there is a setup, or a limit on what all may add together, there is one branch between: the
others are forked from it, the winner is merged into it, and it is what is committed.
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
    """What is neither committed nor kept is aborted by `clear`."""

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
        """With `is_between` all are forked from a branch between them and the parent.

        With the policy "snapshot" a commit lets other branches of the parent live on, and conflicts
        are found by path, whichever was committed first. If the process is killed, the branches
        are dropped by whoever opens the workspace next, unless `ends_with_process` is false.
        """
        self._ends_with_process = ends_with_process
        self._policy: Policy | None = policy
        self.forgotten: list[str] = []
        """Branch names of earlier commits that can no longer be undone because of a commit."""
        self._parent = parent
        self._name = name
        self._disk_each = None if budget is None else budget.disk_each
        self._disk_together = None if budget is None else budget.disk_together
        self._is_between = is_between or self._disk_together is not None
        parent.check_call(is_nested=is_nested or self._is_between, is_part=is_part)
        self._controller = RunController.current()
        self._branches: list[Branch] = []  # children come after their parents
        self._kept: set[Branch] = set()
        self.between: Branch | None = None
        """The branch that all others are forked from, if there is one by now."""

    def open_between(self) -> Branch | None:
        """Makes the branch between, and returns it, where there is to be one and is none yet."""
        if not self._is_between or self.between is not None:
            return None
        self.between = self._parent.branch(
            self._name("setup"), on_success=None, on_error=None, disk_limit=self._disk_together
        )
        self._own(self.between)
        return self.between.__enter__()

    def branch(self, purpose: int | str, parent: Branch | None = None) -> Branch:
        """Returns a branch, to be opened."""
        origin = parent or self.between or self._parent
        branch = origin.branch(
            self._name(purpose), on_success=None, on_error=None, disk_limit=self._disk_each
        )
        self._own(branch)
        return branch

    def _own(self, branch: Branch) -> None:
        self._branches.append(branch)
        # What a steered call was at work on is told by its log.
        branch.is_leased = self._ends_with_process and self._controller is None

    def merged(self, branch: Branch) -> Branch:
        """Commits the branch into the one between, if there is one; returns what has it all."""
        if self.between is None:
            return branch
        self.commit(branch)
        return self.between

    def commit(
        self, branch: Branch, only: Sequence[str] = (), *, drop_rest: bool = False
    ) -> list[Change]:
        """Commits the branch. If that is refused but could be made later, it is kept; so it is with
        the paths that `only` leaves, unless `drop_rest`.
        """
        self.drop_below(branch)
        self._before_end(branch)
        try:
            is_any_first = self._policy == "snapshot"
            changes = branch.commit(
                only=only, drop_rest=drop_rest, policy=self._policy, rebase=is_any_first
            )
            if branch.remaining:
                self._kept.add(branch)
            self.forgotten += branch.forgotten
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
        """Aborts the branches of this call below a branch that is about to be committed.

        The winner's siblings have lost, also where the winner changed nothing: its commit does not
        make them stale, and a branch with live children cannot be committed.
        """
        for other in self._branches[::-1]:
            if other.is_open and other.branch_path.startswith(f"{branch.branch_path}/"):
                self.drop(other)

    def keep(self, branch: Branch) -> None:
        """Leaves the branch open after the call."""
        self._kept.add(branch)

    def keep_all(self) -> None:
        """Leaves all branches open that are open."""
        self._kept.update(self._branches)

    def drop(self, branch: Branch) -> None:
        """Aborts the branch now, unless it is gone already, or to be kept."""
        if branch.is_open and not self._is_kept(branch):
            self._before_end(branch)
            branch.abort()

    def _before_end(self, branch: Branch) -> None:
        if self._controller is not None:
            self._controller.before_end(branch)

    def clear(self, under_way: BaseException | None) -> None:
        """Drops all. What it raises does not hide an exception that is under way."""
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
