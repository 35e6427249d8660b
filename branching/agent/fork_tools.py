"""The seven tools with which an agent forks itself, for the adapter of any agent framework.

    fork_run          fork this run into branches
    inspect_branches  how they stand
    diff_branches     what they changed, path by path
    fork_cost         what they cost
    merge_or_select   pick:<branch id>, auto, or abort
    terminate_branch  stop one
    delete_file       remove a file of the current branch

They answer in text, or with a report; an error is an answer, too, for a tool that raises would end
the run. In a branch they act on a fork of the branch's own, one level down.

`BranchRequest` is a pydantic model because every framework that has an adapter makes the schemas of
tools with pydantic.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

from pydantic import BaseModel, Field

from branching.agent.branch_runtime import BranchRuntime
from branching.agent.coordinator import ForkCoordinator
from branching.agent.errors import ForkBranchLimitError, ForkDepthLimitError, ForkStateError
from branching.agent.resolver import can_win
from branching.agent.types import (
    BranchDiffReport,
    BranchIsolation,
    BranchSpec,
    ForkCostSummary,
    MergeOptions,
    MergeResult,
    MergeStrategy,
    OnConflict,
)
from branching.errors import BranchingError

INSTRUCTIONS = """\
## Forking

You can split this run into branches that try different ways from here, with fork_run. Branches run
on their own: poll them with inspect_branches, compare them with diff_branches and fork_cost, stop
one with terminate_branch. Resolve the fork with merge_or_select before your turn ends: the winner's
files and conversation become yours."""
NOT_ENABLED = "Forking is not enabled for this run."
NO_BRANCHES = "No active branches."
SEQUENTIAL = ("fork_run", "merge_or_select")
"""A fork freezes the files and a merge replaces them: other calls of the same answer must run
before or after these tools, never beside them."""
P = ParamSpec("P")
R = TypeVar("R")


class BranchRequest(BaseModel):
    """One branch that the model asks for."""

    label: str = Field(description="Short unique name")
    steer: str = Field(description="What this branch should do, as its next prompt")
    model: str | None = Field(default=None, description="Another model than yours")
    budget_usd: float | None = Field(default=None, description="Stop it at this cost")
    extra_instructions: str | None = Field(default=None, description="Instructions for it alone")

    def spec(self) -> BranchSpec:
        return BranchSpec(
            label=self.label,
            steer=self.steer,
            model=self.model,
            budget_usd=self.budget_usd,
            extra_instructions=self.extra_instructions,
        )


class Run(Protocol):
    """What the tools need of the run that they are in."""

    @property
    def coordinator(self) -> ForkCoordinator | None:
        """Of the forks that this run makes; None where it cannot fork."""

    @property
    def branch(self) -> BranchRuntime | None:
        """The branch that the run is; None for a parent."""

    def history(self) -> list[Any]:
        """The conversation up to the request that is being answered."""

    def adopt(self, merged: MergeResult) -> None:
        """Replaces the run's conversation by the winner's, from its next request on."""


def answered(tool: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R | str]]:
    """Returns the tool with its errors as answers."""

    @wraps(tool)
    async def call(*arguments: P.args, **options: P.kwargs) -> R | str:
        try:
            return await tool(*arguments, **options)
        except BranchingError as error:
            hint = f" Hint: {error.hint}" if error.hint else ""
            return f"{tool.__name__} failed: {error.message}{hint}"
        except (ForkBranchLimitError, ForkDepthLimitError, ValueError, RuntimeError) as error:
            return f"{tool.__name__} failed: {error}"
        except OSError as error:
            return f"{tool.__name__} failed: {error.strerror or error}"

    return call


class ForkTools:
    """The tools of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def functions(self) -> list[Callable[..., Awaitable[Any]]]:
        """Returns the seven tools as functions that answer errors in words."""
        tools: tuple[Callable[..., Awaitable[Any]], ...] = (
            self.fork_run,
            self.inspect_branches,
            self.diff_branches,
            self.fork_cost,
            self.merge_or_select,
            self.terminate_branch,
            self.delete_file,
        )
        return [answered(tool) for tool in tools]

    async def fork_run(
        self,
        specs: list[BranchRequest],
        isolation: BranchIsolation | None = None,
        strategy: MergeStrategy | None = None,
        aggregate_budget_usd: float | None = None,
    ) -> str:
        """Fork this run into branches that share the conversation so far and work side by side.

        Each branch gets its own copy of the files and goes on with its `steer`. Returns at once;
        poll with inspect_branches, and end the fork with merge_or_select before your turn ends.

        Args:
            specs: The branches, at least one.
            isolation: What the branches share; by default nothing but the team bus.
            strategy: How a winner is chosen by merge_or_select("auto").
            aggregate_budget_usd: All branches together stop at this cost.
        """
        coordinator = self._run.coordinator
        if coordinator is None:
            return NOT_ENABLED
        handle = await coordinator.fork(
            [request.spec() for request in specs],
            parent_history=self._run.history(),
            isolation=isolation,
            strategy=strategy,
            aggregate_budget_usd=aggregate_budget_usd,
        )
        lines = [f"Forked: fork_id={handle.fork_id}"]
        lines += [f"- {branch.id} ({branch.label})" for branch in handle.branches]
        return "\n".join(lines)

    async def inspect_branches(self) -> str:
        """Tell how the branches of the current fork stand, one line each."""
        coordinator = self._run.coordinator
        if coordinator is None:
            return NOT_ENABLED
        statuses = [] if coordinator.is_resolved else coordinator.inspect_branches()
        if not statuses:
            return NO_BRANCHES
        lines = []
        for status in statuses:
            line = f"- {status.id} ({status.label}): {status.state}, turn {status.current_turn}"
            if status.error:
                line += f", error: {status.error}"
            elif status.last_message_preview:
                line += f", last: {status.last_message_preview}"
            lines.append(line)
        asking = coordinator.iter_pending_approvals()
        lines += [f"- {branch_id} waits for the approval of {what}" for branch_id, what in asking]
        return "\n".join(lines)

    async def diff_branches(
        self, fork_id: str, paths: list[str] | None = None
    ) -> BranchDiffReport | str:
        """Compare what the branches changed, path by path.

        Args:
            fork_id: The fork, as fork_run told it.
            paths: Only these paths; by default all that some branch changed.
        """
        coordinator = self._of_fork(fork_id)
        if isinstance(coordinator, str):
            return coordinator
        return await coordinator.diff_branches(paths)

    async def fork_cost(self, fork_id: str) -> ForkCostSummary | str:
        """Tell what each branch of a fork has cost so far, and all of them together.

        Args:
            fork_id: The fork, as fork_run told it.
        """
        coordinator = self._of_fork(fork_id)
        return coordinator if isinstance(coordinator, str) else coordinator.fork_cost()

    async def merge_or_select(
        self,
        action: str,
        paths: list[str] | None = None,
        hunks: dict[str, list[int]] | None = None,
        on_conflict: OnConflict = "keep",
    ) -> str:
        """End the current fork.

        The winner's files are merged into yours, and its conversation becomes yours; the other
        branches are dropped.

        Args:
            action: "pick:<branch id>" to keep that branch, "auto" to let a judge choose, or
                "abort" to drop all branches.
            paths: Merge only these paths, or what is below them; by default all.
            hunks: Of these text files merge only some hunks: their numbers, from 0, in the order
                of the file's diff in diff_branches.
            on_conflict: A path that others changed too: "keep" theirs, take the branch's
                ("theirs"), merge nothing ("fail"), or merge texts line by line ("merge3").
        """
        coordinator = self._run.coordinator
        if coordinator is None:
            return NOT_ENABLED
        if coordinator.is_resolved:
            return "merge_or_select failed: no fork is open; fork_run opens one"
        if action == "abort":
            aborted = await coordinator.abort_fork()
            return f"Aborted {len(aborted)} branches: {', '.join(aborted)}. Nothing was merged."
        options = MergeOptions(
            on_conflict=on_conflict, only=tuple(paths or ()), hunks=dict(hunks or {})
        )
        if action == "auto":
            return await self._auto(coordinator, options)
        if not action.startswith("pick:"):
            return (
                f'merge_or_select failed: {action!r} is not an action; use "pick:<branch id>", '
                '"auto" or "abort"'
            )
        return self._merged(await coordinator.merge_or_select(action, options))

    async def terminate_branch(self, branch_id: str) -> str:
        """Stop one running branch. What it has done so far stays, and it can still be picked.

        Args:
            branch_id: The branch, as fork_run told it.
        """
        coordinator = self._run.coordinator
        if coordinator is None:
            return NOT_ENABLED
        await coordinator.terminate_branch(branch_id)
        (status,) = (each for each in coordinator.inspect_branches() if each.id == branch_id)
        return f"{branch_id} ({status.label}): {status.state}"

    async def delete_file(self, path: str) -> str:
        """Delete a file of the branch that you are in.

        Args:
            path: Relative to the workspace.
        """
        if self._run.coordinator is None:
            return NOT_ENABLED
        branch = self._run.branch
        files = None if branch is None else branch.overlay
        if files is None:
            return "delete_file failed: this run is not in a branch with files of its own"
        if not files.exists(path):
            return f"delete_file failed: there is no {path!r}"
        files.delete(path)
        return f"Deleted {path}."

    async def _auto(self, coordinator: ForkCoordinator, options: MergeOptions) -> str:
        try:
            outcome = await coordinator.resolve(options=options)
        except ForkStateError:
            if any(can_win(branch) for branch in coordinator.branches.values()):
                raise
            aborted = await coordinator.abort_fork()
            return f"Every branch failed: aborted {', '.join(aborted)}. Nothing was merged."
        if outcome.merge_result is not None:
            return self._merged(outcome.merge_result)
        if outcome.verdict is None:
            return (
                "Nothing was merged: the strategy of this fork is manual. "
                'Use "pick:<branch id>" or "abort".'
            )
        picked, sure = outcome.verdict.winner_branch_id, outcome.effective_confidence
        if outcome.auto_eligible:
            merged = await coordinator.merge_or_select(f"pick:{picked}", options)
            return self._merged(merged)
        return (
            f"Nothing was merged: the judge prefers {picked} ({outcome.verdict.reasoning}), but "
            f"its confidence of {sure:.2f} is below the threshold, so a person should decide. "
            f'Ask, then use "pick:<branch id>" or "abort".'
        )

    def _merged(self, merged: MergeResult) -> str:
        self._run.adopt(merged)
        return merged.notice

    def _of_fork(self, fork_id: str) -> ForkCoordinator | str:
        coordinator = self._run.coordinator
        if coordinator is None:
            return NOT_ENABLED
        if coordinator.is_resolved or coordinator.fork_id is None:
            return "There is no open fork."
        if coordinator.fork_id != fork_id:
            return f"The open fork is {coordinator.fork_id}, not {fork_id}."
        return coordinator
