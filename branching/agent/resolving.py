"""Choosing a winner: everybody waited for, the judge asked, the strategy kept to.

    manual                  nobody is asked
    auto, vote              the pick is merged
    auto_with_fallback      the pick may be merged by the caller if it is sure enough; never by us

A judge is asked once for a strategy, as long as no branch goes on.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from branching.agent.errors import ForkStateError
from branching.agent.protocols import Judgement, Question
from branching.agent.runtime import BranchRuntime
from branching.agent.types import BranchOutcome, MergeOptions, MergeStrategy, ResolveOutcome

if TYPE_CHECKING:
    from branching.agent.coordinator import ForkCoordinator


async def outcomes(coordinator: ForkCoordinator) -> list[BranchOutcome]:
    """Tells each branch as a judge sees it; tests of all branches run at once."""
    branches = list(coordinator.branches.values())
    if coordinator.tester is not None:
        tester = coordinator.tester
        ended = [branch for branch in branches if can_win(branch)]
        for branch, ratio in zip(
            ended, await asyncio.gather(*(tester(branch) for branch in ended)), strict=True
        ):
            branch.test_pass_ratio = ratio
    codec = coordinator.codec
    told = []
    for branch in branches:
        history = branch.current_history() or []
        told.append(
            BranchOutcome(
                branch_id=branch.id,
                label=branch.spec.label,
                state=branch.status.state,
                final_message=branch.final_message or branch.status.last_message_preview,
                cost_usd=branch.cost_tracker.usd,
                turns=branch.status.current_turn,
                error_count=int(branch.status.state not in ("running", "done")),
                retry_count=codec.retries(history),
                stuck_loop_hits=codec.stuck_loop_hits(history),
                test_pass_ratio=branch.test_pass_ratio,
            )
        )
    return told


async def resolve(
    coordinator: ForkCoordinator, strategy: MergeStrategy, options: MergeOptions | None
) -> ResolveOutcome:
    """See `ForkCoordinator.resolve`."""
    if strategy.kind == "manual":
        return ResolveOutcome(committed=False, auto_eligible=False)
    branches = list(coordinator.branches.values())
    for branch in branches:
        branch.approvals.refuse()  # nobody is there to be asked
    running = {branch.task for branch in branches if branch.task is not None}
    if running:
        await asyncio.wait(running)
    if not any(can_win(branch) for branch in branches):
        raise ForkStateError("no branch can win: all have failed or said nothing")
    judgement = await _judged(coordinator, strategy)
    verdict = judgement.verdict
    winner = coordinator.branches.get(verdict.winner_branch_id)
    if winner is None or not can_win(winner):
        raise ForkStateError(f"the judge chose {verdict.winner_branch_id!r}, which cannot win")
    merged = None
    if strategy.kind in ("auto", "vote"):
        merged = await coordinator.merge_or_select(f"pick:{winner.id}", options, is_automatic=True)
    sure = judgement.effective_confidence >= strategy.confidence_threshold
    return ResolveOutcome(
        committed=merged is not None,
        auto_eligible=merged is not None or sure,
        verdict=verdict,
        signals=judgement.signals,
        effective_confidence=judgement.effective_confidence,
        merge_result=merged,
        judge_usage=judgement.usage,
    )


def can_win(branch: BranchRuntime) -> bool:
    """It has ended otherwise than by failing, and has something to say."""
    state = branch.status.state
    return state not in ("running", "failed") and bool(branch.current_history())


async def _judged(coordinator: ForkCoordinator, strategy: MergeStrategy) -> Judgement:
    key = repr(strategy)
    if key not in coordinator.judged:
        if coordinator.judge is None:
            raise ForkStateError(f"the strategy {strategy.kind} needs a judge, and there is none")
        coordinator.judged[key] = await coordinator.judge(
            Question(
                goal=coordinator.goal,
                report=await coordinator.diff_branches(),
                outcomes=await coordinator.outcomes(),
                strategy=strategy,
            )
        )
    return coordinator.judged[key]
