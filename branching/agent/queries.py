"""What a fork looks like from outside: all that can be asked, and changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from branching._threads import run_in_thread
from branching.agent.approvals import ApprovalRequest
from branching.agent.branch_runtime import BranchRuntime
from branching.agent.diff import ToolDiff, build_diff_report, diff_tool_calls
from branching.agent.errors import ForkStateError
from branching.agent.fork import Fork
from branching.agent.fork_session import ForkSession
from branching.agent.parent_workspace import ParentWorkspace
from branching.agent.protocols import ConversationCodec
from branching.agent.types import BranchDiffReport, BranchStatus, ForkCostSummary, ForkHandle


class ForkView:
    """The last fork of a parent run, open or over."""

    codec: ConversationCodec
    _place: ParentWorkspace | None
    _session: ForkSession | None = None
    _handle: ForkHandle | None = None

    @property
    def _fork(self) -> Fork | None:
        return None if self._session is None else self._session.fork

    @property
    def fork_id(self) -> str | None:
        """The id of the last fork; None before the first."""
        return None if self._fork is None else self._fork.fork_id

    @property
    def handle(self) -> ForkHandle | None:
        """What `fork` returned last; None before the first fork."""
        return self._handle

    @property
    def branches(self) -> dict[str, BranchRuntime]:
        """The branches of the last fork by id, in the order of the specs."""
        return {} if self._fork is None else dict(self._fork.branches)

    @property
    def is_resolved(self) -> bool:
        """Whether no fork is open: none was made, or it was merged, aborted or closed."""
        return self._fork is None or self._fork.phase == "resolved"

    @property
    def parent_path(self) -> Path | None:
        """The parent's present directory; None without files.

        It changes at each fork and merge: while a fork is open, the parent works in its own branch.
        So it does while others have open branches, from its first use of the files to the end of
        the run; see `writable_path`.
        """
        if self._fork is not None and not self.is_resolved and self._fork.files is not None:
            return self._fork.files.parent.path
        return None if self._place is None else self._place.path

    def inspect_branches(self) -> list[BranchStatus]:
        """Tells how each branch of the last fork stands."""
        return [branch.status for branch in self.branches.values()]

    async def wait(self) -> list[BranchStatus]:
        """Waits until no branch of the last fork runs.

        Returns:
            How each branch stands then. A branch that waits for an approval, or is paused, runs.
        """
        while running := {
            branch.task for branch in self.branches.values() if branch.is_running and branch.task
        }:
            await asyncio.wait(running)
        if self._session is not None:
            await self._session.caught_up()
        return self.inspect_branches()

    def fork_cost(self) -> ForkCostSummary:
        """Tells what the last fork has cost. ForkStateError before the first."""
        fork = self._last_fork()
        costs = tuple(branch.cost() for branch in fork.branches.values())
        known = [cost.cumulative_usd for cost in costs if cost.cumulative_usd is not None]
        total, budget = (sum(known) if known else None), fork.ledger.total.usd
        left = None if budget is None or total is None else max(budget - total, 0.0)
        return ForkCostSummary(
            fork_id=fork.fork_id,
            per_branch=costs,
            aggregate_usd=total,
            aggregate_budget_usd=budget,
            aggregate_remaining_usd=left,
        )

    def iter_pending_approvals(self) -> list[tuple[str, ApprovalRequest]]:
        """Lists what branches wait for, each with its branch's id."""
        return [
            (branch.id, request)
            for branch in self.branches.values()
            for request in branch.approvals.pending()
        ]

    async def diff_branches(self, paths: Sequence[str] | None = None) -> BranchDiffReport:
        """Compares the files of all branches, which may be running.

        Raises:
            ForkStateError: No fork is open.
        """
        fork = self._open().fork
        return await run_in_thread(
            lambda: build_diff_report(fork.fork_id, fork.branches, paths_filter=paths)
        )

    def diff_tools(self) -> ToolDiff:
        """Compares the calls of tools of all branches of the last fork, as far as they are."""
        return diff_tool_calls(
            {
                branch.id: self.codec.tool_calls(branch.current_history() or [])
                for branch in self.branches.values()
            }
        )

    def _last_fork(self) -> Fork:
        if self._fork is None:
            raise ForkStateError("nothing was forked yet")
        return self._fork

    def _open(self) -> ForkSession:
        fork = self._last_fork()
        if fork.phase == "resolved" or self._session is None:
            raise ForkStateError(f"fork {fork.fork_id} is over")
        return self._session

    def _known(self, branch_id: str) -> BranchRuntime:
        branch = self.branches.get(branch_id)
        if branch is None:
            raise ValueError(f"there is no branch {branch_id!r}")
        return branch
