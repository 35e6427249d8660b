"""What a fork has cost, in words."""

from __future__ import annotations

from branching.agent.types import BranchCost, ForkCostSummary
from branching.tui.formatting import money


def spent(cost: ForkCostSummary) -> str:
    """Returns a line for each branch, and one for all: dollars, and the budgets."""
    lines = [f"{each.branch_label}: {_spent(each)} ({each.state})" for each in cost.per_branch]
    budget = cost.aggregate_budget_usd
    total = money(cost.aggregate_usd) or "unknown"
    return "\n".join([*lines, f"together: {total}" + (f" of {money(budget)}" if budget else "")])


def used(cost: ForkCostSummary) -> str:
    """Does the same for tokens and requests."""
    lines = [
        f"{each.branch_label}: {each.tokens} tokens, {each.requests} requests ({each.state})"
        for each in cost.per_branch
    ]
    return "\n".join([*lines, f"together: {sum(each.tokens for each in cost.per_branch)} tokens"])


def _spent(cost: BranchCost) -> str:
    budget = "" if cost.budget_usd is None else f" of {money(cost.budget_usd)}"
    return (money(cost.cumulative_usd) or "price unknown") + budget
