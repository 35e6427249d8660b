"""`branching speculate`: a race of commands, the first that succeeds is committed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from branching.cli.failure import UsageFault, reported
from branching.cli.options import JsonOption, TimeoutOption, WorkspaceOption
from branching.cli.place import owned_workspace
from branching.cli.report import exit_code, print_json, result_facts, why_not

if TYPE_CHECKING:
    from branching.patterns import SpeculationOutcome


def speculate(
    candidates: Annotated[
        list[str] | None,
        typer.Option(
            "-c",
            "--candidate",
            metavar="CMD",
            help="A candidate, run by sh in a branch of its own. Repeat for more.",
            show_default=False,
        ),
    ] = None,
    workspace: WorkspaceOption = None,
    timeout: TimeoutOption = None,
    json: JsonOption = False,
) -> None:
    """Race commands in parallel branches: commit the first that succeeds, drop the others.

    Exit code: 0 committed, 1 no candidate succeeded, 124 the time was over before one did.

    Example: branching speculate -c "./fix-a && make test" -c "./fix-b && make test"
    """
    with reported(json=json):
        if not candidates:
            raise UsageFault("no candidates; give at least one with -c CMD")

        from branching.cli.display import shown
        from branching.cli.interrupt import interruptible
        from branching.patterns import Speculate
        from branching.patterns.program import Program, shell

        with owned_workspace(workspace) as (space, owner), shown(candidates) as listener:
            programs = [
                Program(shell(text), workspace=space.root, owner=owner) for text in candidates
            ]
            pattern = Speculate(programs, timeout=timeout, on_event=listener)
            outcome = interruptible(lambda: pattern(space), is_done=lambda done: done.committed)
        if json:
            print_json(
                "speculate",
                committed=outcome.committed,
                winner=outcome.winner.branch_index if outcome.winner else None,
                candidates=len(candidates),
                results=[result_facts(result) for result in outcome.all_results],
            )
        else:
            _print(outcome, candidates)
        raise typer.Exit(exit_code(outcome))


def _print(outcome: SpeculationOutcome, candidates: list[str]) -> None:
    if outcome.winner is None:
        print("no candidate succeeded")
    else:
        print(f"winner: candidate {outcome.winner.branch_index}")
    for result, text in zip(outcome.all_results, candidates, strict=True):
        error = why_not(result)
        verdict = f"ok: {text}" if error is None else f"fail: {text} ({error})"
        print(f"  [{result.branch_index}] {verdict}")
