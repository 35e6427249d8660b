"""`branching reflexion`: try, criticise the failure, try again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from branching.cli.error_handling import UsageFault, handle_errors
from branching.cli.option_groups import expand_option_groups
from branching.cli.options import CommandArgument, not_blank
from branching.cli.output import finish, result_facts, why_not
from branching.cli.pattern_command import Search, SearchOptions

if TYPE_CHECKING:
    from branching.patterns import SpeculationOutcome


@expand_option_groups
def reflexion(
    command: CommandArgument = None,
    retries: Annotated[
        int, typer.Option("--retries", min=1, help="Maximum number of attempts.")
    ] = 3,
    critique: Annotated[
        str | None,
        typer.Option(
            metavar="CMD",
            callback=not_blank,
            help="Shell command that runs in the failed branch; its output becomes "
            "BRANCHING_FEEDBACK of the next attempt.",
            show_default=False,
        ),
    ] = None,
    *,
    options: SearchOptions,
) -> None:
    """Run a command until it succeeds; each attempt gets feedback on the last one.

    BRANCHING_ATTEMPT is the number of the attempt, from 0, and BRANCHING_FEEDBACK the critique of
    the last one. Exit code: 0 committed, 1 all attempts failed, 124 timeout.

    Example: branching reflexion --critique "make test 2>&1 | tail" -- ./agent.py
    """
    with handle_errors(json=options.json):
        if not command:
            raise UsageFault("no command specified; use -- CMD...")

        from branching.patterns import Reflexion

        with Search("reflexion", options) as search:
            program, critic = search.program(command), search.reader(critique)
            outcome = search.run(Reflexion(program, retries, critique=critic, **search.how))
        facts = {
            "attempts": len(outcome.all_results),
            "winner": outcome.winner.branch_index if outcome.winner else None,
            "results": [result_facts(result) for result in outcome.all_results],
        }
        finish(search, outcome, _lines(outcome), facts, noun="attempt")


def _lines(outcome: SpeculationOutcome) -> list[str]:
    done = "ok (committed)" if outcome.committed else "ok"
    lines = []
    for result in outcome.all_results:
        error = why_not(result)
        lines.append(
            f"attempt {result.branch_index}: {done if error is None else f'fail ({error})'}"
        )
    return lines
