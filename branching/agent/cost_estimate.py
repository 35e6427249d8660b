"""Estimates the cost of a fork in advance.

Each turn sends the whole conversation again, so the input grows with every turn:

    input  = sum over turns t of (history + steer + t * growth)
    output = turns * answer

The numbers are estimates that the caller can replace. Only budgets are limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from branching.agent.types import BranchSpec

CHARACTERS_PER_TOKEN = 4
"""Of English text and code, about."""


@dataclass(frozen=True, kw_only=True)
class TokenPrice:
    """Dollars for a million tokens."""

    input_usd: float
    output_usd: float


@dataclass(frozen=True, kw_only=True)
class CostProjection:
    """The likely cost of a fork."""

    per_branch: Mapping[str, float | None]
    """By label; None where the price is unknown."""
    total_usd: float | None
    """None if one of them is unknown."""
    over_budget: tuple[str, ...]
    """Labels of the branches that are likely to reach their own budget."""


def project_cost(
    specs: Sequence[BranchSpec],
    *,
    history_tokens: int,
    price: Callable[[str | None], TokenPrice | None],
    turns: int = 8,
    answer_tokens: int = 400,
    growth_tokens: int = 1200,
) -> CostProjection:
    """Projects the cost of each branch; `price` is asked for its model (None: the parent's)."""
    costs: dict[str, float | None] = {}
    over = []
    for spec in specs:
        known = price(spec.model)
        if known is None:
            costs[spec.label] = None
            continue
        told = len(spec.steer) + len(spec.extra_instructions or "")
        start = history_tokens + told // CHARACTERS_PER_TOKEN
        sent = turns * start + growth_tokens * turns * (turns - 1) // 2
        usd = (sent * known.input_usd + turns * answer_tokens * known.output_usd) / 1e6
        costs[spec.label] = usd
        if spec.limits.usd is not None and usd > spec.limits.usd:
            over.append(spec.label)
    sums = [usd for usd in costs.values() if usd is not None]
    return CostProjection(
        per_branch=costs,
        total_usd=sum(sums) if len(sums) == len(costs) else None,
        over_budget=tuple(over),
    )
