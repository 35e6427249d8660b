"""`branching run`: the options of one command in one branch. `run_command` runs it."""

from __future__ import annotations

from typing import Annotated

import typer

from branching.cli.error_handling import UsageFault, handle_errors
from branching.cli.isolation_options import IsolationOptions
from branching.cli.limit_options import LimitOptions
from branching.cli.option_groups import expand_option_groups
from branching.cli.options import (
    CommandArgument,
    DropRestOption,
    JsonOption,
    SelectOption,
    SetupOption,
    TimeoutOption,
    WorkspaceOption,
)
from branching.cli.run_command import run_command
from branching.cli.run_plan import End, RunPlan


@expand_option_groups
def run(
    command: CommandArgument = None,
    workspace: WorkspaceOption = None,
    branch: Annotated[
        str | None,
        typer.Option(
            "-b",
            "--branch",
            metavar="NAME",
            help="Name of the branch. [default: run- and 8 hex digits]",
            show_default=False,
        ),
    ] = None,
    on_success: Annotated[
        End, typer.Option(help="What to do with the branch when the command succeeds.")
    ] = End.commit,
    on_error: Annotated[
        End, typer.Option(help="What to do with the branch when it fails.")
    ] = End.abort,
    ask: Annotated[
        bool, typer.Option("--ask", help="Ask whether to commit, whatever the exit code.")
    ] = False,
    timeout: TimeoutOption = None,
    setup: SetupOption = None,
    select: SelectOption = None,
    drop_rest: DropRestOption = False,
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="Do not print the line with the outcome.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="List each path that was committed.")
    ] = False,
    json: JsonOption = False,
    no_log: Annotated[
        bool,
        typer.Option(
            "--no-log",
            help="Do not record the output; the command uses your terminal directly.",
        ),
    ] = False,
    *,
    limits: LimitOptions,
    isolation: IsolationOptions,
) -> None:
    """Run a command in a branch: commit if it succeeds, abort if it fails.

    The exit code is the command's own: 126 if it cannot be executed, 127 if it is not found,
    128+n if signal n killed it, and 124 on timeout.

    The last line on standard error says what happened to the branch. Standard output has only the
    output of the command. branching log keeps a copy of it as long as the workspace keeps a
    mount, a branch or a commit. On a terminal the command has a terminal of its own, which passes
    on all keys.

    Example: branching run -- make test
    """
    with handle_errors(json=json):
        if not command:
            raise UsageFault("no command specified; use -- CMD...")
        plan = RunPlan(
            command=command,
            workspace=workspace,
            branch=branch,
            on_success=on_success,
            on_error=on_error,
            ask=ask,
            timeout=timeout,
            setup=setup,
            select=tuple(select or ()),
            drop_rest=drop_rest,
            quiet=quiet,
            verbose=verbose,
            json=json,
            no_log=no_log,
            limits=limits.limits(),
            isolation=isolation.isolation(),
            place=isolation.place,
        )
        raise typer.Exit(run_command(plan))
