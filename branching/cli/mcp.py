"""`branching mcp`: branches as tools of an agent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from branching.cli.failure import UsageFault, reported
from branching.cli.group import grouped
from branching.cli.limits import LimitOptions
from branching.cli.options import WorkspaceOption, parse_duration
from branching.cli.place import owned_workspace


@grouped
def mcp(
    workspace: WorkspaceOption = None,
    http: Annotated[
        int | None,
        typer.Option(
            "--http",
            metavar="PORT",
            min=0,
            max=65535,
            help="Serve streamable HTTP on this port of 127.0.0.1 instead; 0 takes a free one.",
            show_default=False,
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The token that clients must have over HTTP. [default: $BRANCHING_MCP_TOKEN, or a "
            "new one, shown on stderr]",
            show_default=False,
        ),
    ] = None,
    max_time: Annotated[
        float | None,
        typer.Option(
            metavar="DURATION",
            parser=parse_duration,
            help="The longest time for one command or race. [default: 1h]",
            show_default=False,
        ),
    ] = None,
    hide: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="Files that can neither be read nor written: '**/.env'. Repeatable.",
            show_default=False,
        ),
    ] = None,
    network: Annotated[
        bool, typer.Option(help="Whether commands in branches have the network.")
    ] = True,
    clean_env: Annotated[
        bool,
        typer.Option("--clean-env", help="Give commands an environment without keys and tokens."),
    ] = False,
    *,
    limits: LimitOptions,
) -> None:
    """Serve branches of the workspace as tools of an agent (Model Context Protocol).

    Speaks on standard input and output, and ends with the client: branches that were made through
    it and neither committed nor kept are dropped then. Limits hold for each command.

    Example: branching mcp -w ~/project
    """
    with reported(json=False):
        from branching.cli.interrupt import interruptible
        from branching.cli.token import read_token
        from branching.process import Sandbox

        if token_file is not None and http is None:
            raise UsageFault("--token-file is for --http: on standard input there is no token")
        try:
            token = read_token(token_file)
            Sandbox.of("/", hide=tuple(hide or ()))  # are they globs?
        except ValueError as error:
            raise UsageFault(str(error)) from error
        # Only now: the protocol's library takes a second to load.
        try:
            from branching.mcp import Desk, Rules, serve_http, serve_stdio
            from branching.mcp.desk import SECONDS_MAX_DEFAULT, host_directories
        except ImportError as error:
            if error.name != "mcp":
                raise
            raise UsageFault(f"{error}") from error
        rules = Rules(
            limits=limits.limits(),
            hide=tuple(hide or ()),
            network=network,
            clean_env=clean_env,
            seconds_max=max_time or SECONDS_MAX_DEFAULT,
            seen_as=host_directories(),
        )
        with owned_workspace(workspace) as (space, owner):
            desk = Desk(space, owner, rules)

            def call() -> bool:
                if http is None:
                    serve_stdio(desk)
                else:
                    serve_http(desk, port=http, token=token)
                return True

            interruptible(call, is_done=bool)
