"""`branching speculate`: a race of commands, the first that succeeds is committed."""

from __future__ import annotations

from branching.cli.error_handling import UsageFault, handle_errors
from branching.cli.option_groups import expand_option_groups
from branching.cli.options import CandidatesOption
from branching.cli.output import finish, result_facts, result_lines
from branching.cli.pattern_command import Search, SearchOptions


@expand_option_groups
def speculate(candidates: CandidatesOption = None, *, options: SearchOptions) -> None:
    """Race commands in parallel branches: commit the first that succeeds, drop the others.

    Exit code: 0 committed, 1 no candidate succeeded, 124 timeout.

    Example: branching speculate -c "./fix-a && make test" -c "./fix-b && make test"
    """
    with handle_errors(json=options.json):
        if not candidates:
            raise UsageFault("no candidates; give at least one with -c CMD")

        from branching.patterns import Speculate

        with Search("speculate", options, candidates) as search:
            programs = [search.program(text) for text in candidates]
            outcome = search.run(Speculate(programs, **search.how))
        winner = outcome.winner
        facts = {
            "winner": winner.branch_index if winner else None,
            "candidates": len(candidates),
            "results": [result_facts(result) for result in outcome.all_results],
        }
        finish(search, outcome, result_lines(outcome, labels=True, scores=False), facts)
