"""`branching best-of-n`: one command N times, the best success is committed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from branching.cli.failure import UsageFault, reported
from branching.cli.options import CommandArgument, JsonOption, TimeoutOption, WorkspaceOption
from branching.cli.place import owned_workspace
from branching.cli.report import exit_code, print_json, result_facts, why_not

if TYPE_CHECKING:
    from branching.patterns import SpeculationOutcome


def best_of_n(
    command: CommandArgument = None,
    n: Annotated[int, typer.Option("-n", min=1, help="How many attempts.")] = 3,
    workspace: WorkspaceOption = None,
    timeout: TimeoutOption = None,
    json: JsonOption = False,
) -> None:
    """Run a command N times in parallel branches: commit the success with the highest score.

    The command writes its score to descriptor 3 (echo 0.95 >&3); without one a success is worth
    1. BRANCHING_ATTEMPT tells it which attempt it is, from 0. Exit code: 0 committed, 1 no
    attempt succeeded, 124 the time was over before one did.

    Example: branching best-of-n -n 5 -- ./solve.py
    """
    with reported(json=json):
        if not command:
            raise UsageFault("no command specified; use -- CMD...")

        from branching.cli.display import shown
        from branching.cli.interrupt import interruptible
        from branching.patterns import BestOfN
        from branching.patterns.program import Program

        labels = [f"attempt {index}" for index in range(n)]
        with owned_workspace(workspace) as (space, owner), shown(labels) as listener:
            program = Program(command, workspace=space.root, owner=owner, score=True)
            pattern = BestOfN(program, n, timeout=timeout, on_event=listener)
            outcome = interruptible(lambda: pattern(space), is_done=lambda done: done.committed)
        winner = outcome.winner
        if json:
            print_json(
                "best-of-n",
                n=n,
                committed=outcome.committed,
                winner=winner and {"index": winner.branch_index, "score": winner.score},
                results=[
                    result_facts(result, score=result.score) for result in outcome.all_results
                ],
            )
        else:
            _print(outcome)
        raise typer.Exit(exit_code(outcome))


def _print(outcome: SpeculationOutcome) -> None:
    if outcome.winner is None:
        print("no attempt succeeded")
    else:
        winner = outcome.winner
        print(f"winner: attempt {winner.branch_index} (score: {winner.score:.2f})")
    for result in outcome.all_results:
        error = why_not(result)
        why = "" if error is None else f" ({error})"
        verdict = "ok" if result.success else "fail"
        print(f"  [{result.branch_index}] {verdict:<4} ({result.score:.2f}){why}")
