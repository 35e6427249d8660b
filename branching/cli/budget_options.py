"""The options that bound what agents spend, as far as they tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from branching.agent.types import Budget


def parse_usd(text: str) -> float:
    """Reads 0.5, half a dollar. Zero is refused: nothing could be asked for it."""
    try:
        usd = float(text.removeprefix("$"))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not an amount; write 0.50") from None
    if not 0 < usd < float("inf"):
        raise typer.BadParameter("a budget must be more than zero")
    return usd


@dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    """What each branch may spend, and all of them together."""

    budget_usd: Annotated[
        float | None,
        typer.Option(
            metavar="USD",
            parser=parse_usd,
            help="Cost limit of each branch in US dollars. The agent reports its usage on file "
            'descriptor 3, one JSON line for each request: {"usd": 0.02, "tokens": '
            "1200}. It is stopped as soon as it exceeds the limit; an agent that reports "
            "nothing counts as failed.",
            show_default=False,
        ),
    ] = None
    budget_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Token limit of each branch.", show_default=False),
    ] = None
    budget_requests: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Request limit of each branch.", show_default=False),
    ] = None
    group_budget_usd: Annotated[
        float | None,
        typer.Option(
            metavar="USD",
            parser=parse_usd,
            help="Cost limit of all branches together in US dollars.",
            show_default=False,
        ),
    ] = None
    group_budget_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Token limit of all branches together.", show_default=False
        ),
    ] = None

    def each(self, seconds: float | None) -> Budget:
        """Returns the budget of each branch."""
        from branching.agent.types import Budget

        return Budget(
            usd=self.budget_usd,
            tokens=self.budget_tokens,
            requests=self.budget_requests,
            seconds=seconds,
        )

    def group(self) -> Budget:
        """Returns the budget of all together."""
        from branching.agent.types import Budget

        return Budget(usd=self.group_budget_usd, tokens=self.group_budget_tokens)
