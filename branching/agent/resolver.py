"""Choosing a winner: everybody waited for, the judge asked, the strategy kept to.

    manual                  nobody is asked
    auto, vote              the pick is merged
    auto_with_fallback      the pick may be merged by the caller if it is sure enough; never by us

A judge is asked once for a strategy, as long as no branch goes on.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod

from branching.agent.branch_runtime import BranchRuntime, Tester
from branching.agent.errors import ForkStateError
from branching.agent.protocols import Judge, Judgement, Question
from branching.agent.queries import ForkView
from branching.agent.types import (
    BranchOutcome,
    MergeOptions,
    MergeResult,
    MergeStrategy,
    ResolveOutcome,
)


class Resolver(ForkView):
    """Asks a judge, and merges what it chose."""

    goal: str
    judge: Judge | None
    tester: Tester | None
    judged: dict[str, Judgement]
    """Answers of judges in this fork, by strategy: asked once."""

    @abstractmethod
    async def merge_or_select(
        self, action: str, options: MergeOptions | None = None, *, is_automatic: bool = False
    ) -> MergeResult:
        """Merges a branch."""

    async def outcomes(self) -> list[BranchOutcome]:
        """Tells each branch as a judge sees it; runs the tests, of all at once, where there is a
        tester."""
        branches = list(self.branches.values())
        if self.tester is not None:
            ended = [branch for branch in branches if can_win(branch)]
            for branch, ratio in zip(
                ended, await asyncio.gather(*map(self.tester, ended)), strict=True
            ):
                branch.test_pass_ratio = ratio
        return [self._outcome(branch) for branch in branches]

    async def resolve(
        self, strategy: MergeStrategy | None = None, options: MergeOptions | None = None
    ) -> ResolveOutcome:
        """Waits for all branches, asks the judge, and merges where the strategy says so.

        ForkStateError without an open fork or a judge, or when no branch can win.
        """
        strategy = strategy or self._open().fork.strategy
        if strategy.kind == "manual":
            return ResolveOutcome(committed=False, auto_eligible=False)
        branches = list(self.branches.values())
        for branch in branches:
            branch.approvals.refuse()  # nobody is there to be asked
        running = {branch.task for branch in branches if branch.task is not None}
        if running:
            await asyncio.wait(running)
        if not any(can_win(branch) for branch in branches):
            raise ForkStateError("no branch can win: all have failed or produced no message")
        judgement = await self._judged(strategy)
        verdict = judgement.verdict
        winner = self.branches.get(verdict.winner_branch_id)
        if winner is None or not can_win(winner):
            raise ForkStateError(f"the judge chose {verdict.winner_branch_id!r}, which cannot win")
        merged = None
        if strategy.kind in ("auto", "vote"):
            merged = await self.merge_or_select(f"pick:{winner.id}", options, is_automatic=True)
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

    async def _judged(self, strategy: MergeStrategy) -> Judgement:
        key = repr(strategy)
        if key not in self.judged:
            if self.judge is None:
                raise ForkStateError(
                    f"the strategy {strategy.kind} needs a judge, and there is none"
                )
            self.judged[key] = await self.judge(
                Question(
                    goal=self.goal,
                    report=await self.diff_branches(),
                    outcomes=await self.outcomes(),
                    strategy=strategy,
                )
            )
        return self.judged[key]

    def _outcome(self, branch: BranchRuntime) -> BranchOutcome:
        codec, history = self.codec, branch.current_history() or []
        return BranchOutcome(
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


def can_win(branch: BranchRuntime) -> bool:
    """It has ended otherwise than by failing, and has something to say."""
    state = branch.status.state
    return state not in ("running", "failed") and bool(branch.current_history())
