"""`branching cascaded`: start with one, widen as long as all fail."""

from __future__ import annotations

from typing import Annotated

import typer

from branching.cli.error_handling import UsageFault, handle_errors
from branching.cli.option_groups import expand_option_groups
from branching.cli.options import CommandArgument, parse_duration, parse_widths
from branching.cli.output import finish, result_facts, result_lines
from branching.cli.pattern_command import Search, SearchOptions


@expand_option_groups
def cascaded(
    command: CommandArgument = None,
    fan_out: Annotated[
        str,
        typer.Option(metavar="N,N,...", help="How many attempts each wave has."),
    ] = "1,2,4",
    wave_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="DURATION",
            parser=parse_duration,
            help="Time limit of each wave: 90, 90s, 5m.",
            show_default=False,
        ),
    ] = None,
    *,
    options: SearchOptions,
) -> None:
    """Run a command in waves of parallel branches, each wave wider, until one succeeds.

    BRANCHING_FEEDBACK describes how the attempts of earlier waves failed: exit code and the end
    of the output. BRANCHING_ATTEMPT is the number of the attempt, from 0. Exit code: 0 committed,
    1 all attempts failed, 124 timeout.

    Example: branching cascaded --fan-out 1,3,9 -- ./agent.py
    """
    with handle_errors(json=options.json):
        if not command:
            raise UsageFault("no command specified; use -- CMD...")
        widths = parse_widths(fan_out)

        from branching.patterns import Cascaded

        with Search("cascaded", options) as search:
            program = search.explainer(command)
            outcome = search.run(
                Cascaded(program, fan_out=widths, wave_timeout=wave_timeout, **search.how)
            )
        winner = outcome.winner
        facts = {
            "fan_out": widths,
            "attempts": len(outcome.all_results),
            "winner": winner.branch_index if winner else None,
            "results": [result_facts(result) for result in outcome.all_results],
        }
        lines = result_lines(outcome, labels=False, scores=False)
        finish(search, outcome, lines, facts, noun="attempt")
