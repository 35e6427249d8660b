"""`branching tournament`: all play, pairs are judged, one is left."""

from __future__ import annotations

from typing import Annotated

import typer

from branching.cli.error_handling import UsageFault, handle_errors
from branching.cli.option_groups import expand_option_groups
from branching.cli.options import CandidatesOption, CommandArgument, not_blank
from branching.cli.output import finish, result_facts, result_lines
from branching.cli.pattern_command import Search, SearchOptions


@expand_option_groups
def tournament(
    command: CommandArgument = None,
    candidates: CandidatesOption = None,
    n: Annotated[
        int | None,
        typer.Option(
            "-n", min=1, help="How many attempts of CMD. [default: 4]", show_default=False
        ),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(
            metavar="CMD",
            callback=not_blank,
            help="Shell command that compares each pair: BRANCHING_A and BRANCHING_B are the two "
            "directories; it prints the better one, a or b.",
            show_default=False,
        ),
    ] = None,
    parallel_judges: Annotated[
        bool, typer.Option("--parallel-judges", help="Judge the pairs of a round concurrently.")
    ] = False,
    *,
    options: SearchOptions,
) -> None:
    """Run candidates in parallel branches, then let a judge eliminate them in pairs.

    Give either one command N times (-- CMD), or several (-c CMD -c CMD). The judge runs in the
    first branch of the pair; a judge that fails ends the call. Exit code: 0 committed, 1 no
    candidate succeeded, 124 timeout.

    Example: branching tournament -n 4 --judge ./compare.sh -- ./agent.py
    """
    with handle_errors(json=options.json):
        if bool(command) == bool(candidates):
            raise UsageFault("give either one command (-- CMD...) or candidates (-c CMD)")
        if candidates and n is not None:
            raise UsageFault("-n needs a single command; candidates given with -c run once each")
        if judge is None:
            raise UsageFault("a tournament needs a judge; give one with --judge CMD")

        from branching.patterns import Tournament

        labels = candidates or [f"attempt {index}" for index in range(n or 4)]
        with Search("tournament", options, labels) as search:
            entrants = (
                [search.program(text) for text in candidates]
                if candidates
                else search.program(command or [])
            )
            outcome = search.run(
                Tournament(
                    entrants,
                    None if candidates else len(labels),
                    judge=search.judge(judge),
                    parallel_judges=parallel_judges,
                    **search.how,
                )
            )
        winner = outcome.winner
        facts = {
            "winner": winner.branch_index if winner else None,
            "candidates": len(labels),
            "results": [result_facts(result) for result in outcome.all_results],
        }
        lines = result_lines(outcome, labels=bool(candidates), scores=False)
        finish(search, outcome, lines, facts)
