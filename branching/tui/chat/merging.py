"""How a fork of a chat ends: by a person's choice, or by a judge's, which a person may overrule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from branching.agent.coordinator import ForkCoordinator
from branching.agent.types import MergeResult, ResolveOutcome
from branching.errors import BranchingError
from branching.tui.chat.command_parser import NotUnderstood
from branching.tui.chat.protocols import Wanted, Who
from branching.tui.formatting import failure


class Merging:
    """The merges of one chat.

    Args:
        coordinator: The coordinator of the chat's forks.
        note: Adds an entry to the transcripts, where the person sees it.
        on_merged: Receives the result of each merge.
    """

    def __init__(
        self,
        coordinator: ForkCoordinator,
        note: Callable[[str, Who], None],
        on_merged: Callable[[MergeResult], None],
    ) -> None:
        self._coordinator = coordinator
        self._note = note
        self._on_merged = on_merged
        self._is_resolving = False

    async def begin(self) -> Wanted | None:
        """`/merge`: as the strategy says, a picker, an acceptance, or the merge itself."""
        if self._coordinator.is_resolved:
            raise NotUnderstood("there is no fork to merge")
        if self._is_resolving:
            raise NotUnderstood("the judge is being asked already")
        handle = self._coordinator.handle
        assert handle is not None, "an open fork has one"
        if handle.merge_strategy.kind == "manual":
            return Wanted(kind="pick")
        self._note("waiting for all branches and the judge", "note")
        self._is_resolving = True
        try:
            outcome = await self._coordinator.resolve()
        except Exception as error:  # of the judge's model: whatever it is, a person can choose
            text = f"no judgement: {failure(error)}"
            self._note(text, "error")
            return None if self._coordinator.is_resolved else Wanted(kind="pick", text=text)
        finally:
            self._is_resolving = False
        return self._proposed(outcome)

    async def pick(self, branch_id: str) -> bool:
        """Merges a branch; False if it could not be done, which is noted."""
        try:
            result = await self._coordinator.merge_or_select(f"pick:{branch_id}")
        except (BranchingError, OSError, ValueError) as error:
            self._note(f"nothing was merged: {failure(error)}", "error")
            return False
        self._merged(result)
        return True

    async def override(self, label: str) -> None:
        """Takes a judge's merge back, and merges this branch instead."""
        branches = self._coordinator.branches.values()
        found = [each.id for each in branches if label in (each.id, each.spec.label)]
        if not found:
            raise NotUnderstood(f"no branch was called {label!r}")
        self._merged(await self._coordinator.override(found[0]))

    def _proposed(self, outcome: ResolveOutcome) -> Wanted | None:
        if outcome.merge_result is not None:
            self._merged(outcome.merge_result)
            self._note("/override LABEL takes another branch instead", "note")
            return None
        verdict = outcome.verdict
        if verdict is None:
            return Wanted(kind="pick")
        sure = outcome.effective_confidence or 0.0
        text = f"{sure:.2f} sure: {verdict.reasoning}"
        kind: Literal["accept", "pick"] = "accept" if outcome.auto_eligible else "pick"
        return Wanted(kind=kind, text=text, branch_id=verdict.winner_branch_id)

    def _merged(self, result: MergeResult) -> None:
        self._on_merged(result)
        self._note(result.notice, "note")
