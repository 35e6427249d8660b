"""`branching session`: a Python prompt that forks with its memory and its files."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from branching.cli.error_handling import UsageFault, handle_errors, note
from branching.cli.isolation_options import (
    CleanEnvOption,
    EnvOption,
    HideOption,
    NoNetworkOption,
    checked_globs,
    passed_on,
)
from branching.cli.limit_options import parse_cpu, parse_size
from branching.cli.options import WorkspaceOption
from branching.cli.workspace import opened_workspace

if TYPE_CHECKING:
    from branching.session import Session


def session(
    workspace: WorkspaceOption = None,
    python: Annotated[
        str | None,
        typer.Option(
            metavar="PROGRAM",
            help="Another interpreter, for example that of a virtual environment.",
            show_default=False,
        ),
    ] = None,
    hide: HideOption = None,
    no_network: NoNetworkOption = False,
    clean_env: CleanEnvOption = False,
    env: EnvOption = None,
    memory_limit: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=parse_size,
            help="Memory limit of the session and its children together: 512M, 1.5G.",
            show_default=False,
        ),
    ] = None,
    cpu_limit: Annotated[
        float | None,
        typer.Option(
            metavar="FRAC",
            parser=parse_cpu,
            help="CPU limit of the session and its children together: 0.5 is half of one CPU.",
            show_default=False,
        ),
    ] = None,
    pids_limit: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=4_194_304,  # PIDS_MAX; its module is not loaded for a help
            help="Maximum number of processes and threads of the session and its children.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Open a Python prompt in a branch, and fork it with its variables, open files and files.

    %fork 3 creates three children, %child 1 switches to one of them, %pick 1 makes it the
    session, and %back drops them all. %commit writes the files of the session to the workspace;
    %help lists the rest. Tab completes names. Changes that the session did not commit stay in a
    branch.

    Example: branching session
    """
    with handle_errors(json=False):
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise UsageFault(
                "session needs a terminal; a program can use branching.Session in Python"
            )
        from branching.cli.session_console import Console
        from branching.process import ResourceLimits
        from branching.session import Session, other_python

        try:
            interpreter = None if python is None else other_python.find(python)
        except FileNotFoundError as error:
            raise UsageFault(str(error)) from error
        limits = ResourceLimits(memory=memory_limit, cpu=cpu_limit, pids=pids_limit)
        environment = passed_on(env, clean_env=clean_env)
        with (
            opened_workspace(workspace) as space,
            Session(
                space,
                python=interpreter,
                hide=checked_globs(hide),
                limits=None if limits == ResourceLimits() else limits,
                network=not no_network,
                clean_env=clean_env,
                env=environment,
                stdout=lambda data: _pass_on(1, data),
                stderr=lambda data: _pass_on(2, data),
            ) as live,
        ):
            console = Console(live)
            try:
                console.use()
            finally:
                _leave(live, is_aborted=console.is_aborted)


def _pass_on(number: int, data: bytes) -> None:
    stream = sys.stdout if number == 1 else sys.stderr
    stream.flush()
    stream.buffer.write(data)
    stream.flush()


def _leave(live: Session, *, is_aborted: bool) -> None:
    """Ends the session. Its branch stays open if it has changes, unless they are to be dropped."""
    if is_aborted:
        live.abort()
        return
    from branching.cli.session_commands import leave

    name = leave(live)
    if name is None:
        return
    note(f"branch: {name}")
    note("action: kept")
    note(f"Hint: branching diff {name}; branching commit {name}; branching abort {name}")
