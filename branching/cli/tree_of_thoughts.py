"""`branching tree-of-thoughts`: the best strategy, then the best refinement of it."""

from __future__ import annotations

from branching.cli.error_handling import UsageFault, handle_errors
from branching.cli.option_groups import expand_option_groups
from branching.cli.options import CandidatesOption, DepthOption, EvaluateOption, ExpandOption
from branching.cli.output import finish_ranked
from branching.cli.pattern_command import Search, SearchOptions


@expand_option_groups
def tree_of_thoughts(
    candidates: CandidatesOption = None,
    expand: ExpandOption = None,
    evaluate: EvaluateOption = None,
    max_depth: DepthOption = 2,
    *,
    options: SearchOptions,
) -> None:
    """Run candidates, refine the best one, then the best refinement, level by level; commit it.

    Candidates write their score to descriptor 3, or --evaluate scores them. Without --expand
    there is one level. The candidates of the next level start from the best one of the last
    level. Exit code: 0 committed, 1 no candidate of a level succeeded, 124 timeout.

    Example: branching tree-of-thoughts -c ./a -c ./b --expand ./next.sh --evaluate ./score.sh
    """
    with handle_errors(json=options.json):
        if not candidates:
            raise UsageFault("no candidates; give at least one with -c CMD")

        from branching.patterns import TreeOfThoughts

        with Search("tree-of-thoughts", options, candidates) as search:
            outcome = search.run(
                TreeOfThoughts(
                    [search.program(text, score=True) for text in candidates],
                    expand=search.expander(expand) if expand else None,
                    evaluate=search.scorer(evaluate),
                    max_depth=max_depth,
                    **search.how,
                )
            )
        finish_ranked(search, outcome)
