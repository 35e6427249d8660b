"""`branching beam-search`: keep the best few alive at each level."""

from __future__ import annotations

from typing import Annotated

import typer

from branching.cli.error_handling import UsageFault, handle_errors
from branching.cli.option_groups import expand_option_groups
from branching.cli.options import CandidatesOption, DepthOption, EvaluateOption, ExpandOption
from branching.cli.output import finish_ranked
from branching.cli.pattern_command import Search, SearchOptions


@expand_option_groups
def beam_search(
    candidates: CandidatesOption = None,
    expand: ExpandOption = None,
    evaluate: EvaluateOption = None,
    beam_width: Annotated[
        int, typer.Option("--beam-width", min=1, help="How many branches survive each level.")
    ] = 3,
    max_depth: DepthOption = 2,
    *,
    options: SearchOptions,
) -> None:
    """Run candidates, keep the best few and expand them, level by level; commit the best.

    Candidates write their score to descriptor 3, or --evaluate scores them. The candidates of the
    next level start from the expanded branch. Exit code: 0 committed, 1 no candidate of a level
    succeeded, 124 timeout.

    Example: branching beam-search -c ./a -c ./b --expand ./next.sh --max-depth 3
    """
    with handle_errors(json=options.json):
        if not candidates:
            raise UsageFault("no candidates; give at least one with -c CMD")
        if expand is None:
            raise UsageFault("a beam search needs --expand CMD, which prints the next candidates")

        from branching.patterns import BeamSearch

        with Search("beam-search", options, candidates) as search:
            outcome = search.run(
                BeamSearch(
                    [search.program(text, score=True) for text in candidates],
                    expand=search.expander(expand),
                    evaluate=search.scorer(evaluate),
                    beam_width=beam_width,
                    max_depth=max_depth,
                    **search.how,
                )
            )
        finish_ranked(search, outcome)
