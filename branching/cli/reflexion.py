"""`branching reflexion`: try, criticise the failure, try again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from branching.cli.failure import UsageFault, reported
from branching.cli.options import CommandArgument, JsonOption, TimeoutOption, WorkspaceOption
from branching.cli.place import owned_workspace
from branching.cli.report import exit_code, print_json, result_facts, why_not

if TYPE_CHECKING:
    from branching.patterns import SpeculationOutcome


def reflexion(
    command: CommandArgument = None,
    retries: Annotated[int, typer.Option("--retries", min=1, help="How many attempts in all.")] = 3,
    critique: Annotated[
        str | None,
        typer.Option(
            metavar="CMD",
            help="Run by sh in the branch that failed; what it prints is the next attempt's "
            "BRANCHING_FEEDBACK.",
            show_default=False,
        ),
    ] = None,
    workspace: WorkspaceOption = None,
    timeout: TimeoutOption = None,
    json: JsonOption = False,
) -> None:
    """Run a command until it succeeds, each time in a fresh branch, learning from the last.

    BRANCHING_ATTEMPT tells the command which attempt it is, from 0; BRANCHING_FEEDBACK what the
    critique said of the one before. Exit code: 0 committed, 1 all attempts failed, 124 the time
    was over before one succeeded.

    Example: branching reflexion --critique "make test 2>&1 | tail" -- ./agent.py
    """
    with reported(json=json):
        if not command:
            raise UsageFault("no command specified; use -- CMD...")

        from branching.cli.display import shown
        from branching.cli.interrupt import interruptible
        from branching.patterns import Reflexion
        from branching.patterns.program import Program, Reader, shell

        with owned_workspace(workspace) as (space, owner), shown() as listener:
            program = Program(command, workspace=space.root, owner=owner)
            critic = None
            if critique is not None:
                critic = Reader(shell(critique), workspace=space.root, owner=owner)
            pattern = Reflexion(
                program, retries, critique=critic, timeout=timeout, on_event=listener
            )
            outcome = interruptible(lambda: pattern(space), is_done=lambda done: done.committed)
        if json:
            print_json(
                "reflexion",
                committed=outcome.committed,
                attempts=len(outcome.all_results),
                winner=outcome.winner.branch_index if outcome.winner else None,
                results=[result_facts(result) for result in outcome.all_results],
            )
        else:
            _print(outcome)
        raise typer.Exit(exit_code(outcome))


def _print(outcome: SpeculationOutcome) -> None:
    for result in outcome.all_results:
        error = why_not(result)
        verdict = "ok (committed)" if error is None else f"fail ({error})"
        print(f"attempt {result.branch_index}: {verdict}")
    if not outcome.committed:
        print("all attempts failed")
