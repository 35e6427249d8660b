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
        raise typer.BadParameter(f"{text!r} is not a sum; write 0.50") from None
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
            help='Dollars that each branch may spend. It tells on descriptor 3: {"usd": 0.02, '
            '"tokens": 1200}, a line for each request, and is stopped by the line that goes '
            "beyond. One that tells nothing has failed.",
            show_default=False,
        ),
    ] = None
    budget_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="So too its tokens.", show_default=False),
    ] = None
    budget_requests: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="So too its requests.", show_default=False),
    ] = None
    group_budget_usd: Annotated[
        float | None,
        typer.Option(
            metavar="USD",
            parser=parse_usd,
            help="Dollars that all branches may spend together.",
            show_default=False,
        ),
    ] = None
    group_budget_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="So too their tokens.", show_default=False),
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
