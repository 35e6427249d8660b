"""`branching best-of-n`: one command N times, the best success is committed."""

from __future__ import annotations

from typing import Annotated

import typer

from branching.cli.error_handling import UsageFault, handle_errors
from branching.cli.option_groups import expand_option_groups
from branching.cli.options import CommandArgument, EvaluateOption
from branching.cli.output import finish, result_facts, result_lines
from branching.cli.pattern_command import Search, SearchOptions


@expand_option_groups
def best_of_n(
    command: CommandArgument = None,
    n: Annotated[int, typer.Option("-n", min=1, help="How many attempts.")] = 3,
    evaluate: EvaluateOption = None,
    *,
    options: SearchOptions,
) -> None:
    """Run a command N times in parallel branches: commit the success with the highest score.

    The command writes its score to descriptor 3 (echo 0.95 >&3); without one, a success scores 1.
    BRANCHING_ATTEMPT is the number of the attempt, from 0. Exit code: 0 committed, 1 no attempt
    succeeded, 124 timeout.

    Example: branching best-of-n -n 5 -- ./solve.py
    """
    with handle_errors(json=options.json):
        if not command:
            raise UsageFault("no command specified; use -- CMD...")

        from branching.patterns import BestOfN

        with Search("best-of-n", options, [f"attempt {index}" for index in range(n)]) as search:
            program = search.program(command, score=True)
            scorer = search.scorer(evaluate)
            outcome = search.run(BestOfN(program, n, evaluate=scorer, **search.how))
        winner = outcome.winner
        facts = {
            "n": n,
            "winner": winner and {"index": winner.branch_index, "score": winner.score},
            "results": [result_facts(each, score=each.score) for each in outcome.all_results],
        }
        lines = result_lines(outcome, labels=False, scores=True)
        finish(search, outcome, lines, facts, noun="attempt", score=True)
