"""`branching mcp`: branches as tools of an agent."""

from __future__ import annotations

import os
import stat
from math import ceil
from pathlib import Path
from typing import Annotated

import typer

from branching.cli.agent_files import AGENTS, Scope
from branching.cli.error_handling import UsageFault, handle_errors
from branching.cli.isolation_options import checked_globs, checked_variables
from branching.cli.limit_options import LimitOptions
from branching.cli.option_groups import expand_option_groups
from branching.cli.options import WorkspaceOption, parse_duration
from branching.cli.workspace import owned_workspace

TOKEN_VARIABLE = "BRANCHING_MCP_TOKEN"
TOKEN_CHARACTERS_MIN = 16


@expand_option_groups
def mcp(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="install AGENT",
            help="Instead of serving, configure an agent to start this server with the given "
            f"options: {', '.join(AGENTS)}.",
            show_default=False,
        ),
    ] = None,
    scope: Annotated[
        Scope,
        typer.Option(
            help="With install: the configuration of the project, or the user's own for all "
            "projects.",
        ),
    ] = Scope.project,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="With install: print what would change, and write nothing."),
    ] = False,
    workspace: WorkspaceOption = None,
    http: Annotated[
        int | None,
        typer.Option(
            "--http",
            metavar="PORT",
            min=0,
            max=65535,
            help="Serve streamable HTTP on this port of 127.0.0.1 instead; 0 chooses a free port.",
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
            help="Maximum time of one command or race. [default: 1h]",
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
    ] = False,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Pass this variable on to commands. By default they get only PATH, HOME, the "
            "locale and similar variables, no keys or tokens. Repeatable.",
            show_default=False,
        ),
    ] = None,
    env_all: Annotated[
        bool, typer.Option("--env-all", help="Pass the whole environment on to commands.")
    ] = False,
    clean_env: Annotated[bool, typer.Option("--clean-env", hidden=True)] = False,
    propose: Annotated[
        bool,
        typer.Option(
            "--propose",
            help="Let the agent propose and the user commit: there are no tools that commit, undo "
            "or redo, and branches with changes stay open when the server ends.",
        ),
    ] = False,
    *,
    limits: LimitOptions,
) -> None:
    """Serve branches of the workspace as tools of an agent (Model Context Protocol).

    The server uses standard input and output, and ends with the client. It then drops the
    branches that the client created and neither committed nor kept. Limits apply to each command.
    Commands have no network, keys or tokens of the environment, unless an option allows it.

    Example: branching mcp install claude --network
    """
    with handle_errors(json=False):
        if env_all and (clean_env or env):
            raise UsageFault("--env-all passes the whole environment; remove --env and --clean-env")
        checked_variables(env)
        if words:
            if http is not None or token_file is not None:
                raise UsageFault("install writes configurations of servers on standard input")
            _install(context, words, scope, workspace, is_dry=dry_run)
            return
        if dry_run or _is_given(context, "scope"):
            raise UsageFault("--dry-run and --scope are for branching mcp install AGENT")
        from branching.cli.signals import run_interruptible

        if token_file is not None and http is None:
            raise UsageFault("--token-file is for --http: on standard input there is no token")
        hidden = checked_globs(hide)
        try:
            token = _read_token(token_file)
        except ValueError as error:
            raise UsageFault(str(error)) from error
        # Only now: the protocol's library takes a second to load.
        try:
            from branching.mcp import Rules, WorkspaceSession, serve_http, serve_stdio
            from branching.mcp.workspace_session import SECONDS_MAX_DEFAULT, host_directories
        except ImportError as error:
            if error.name != "mcp":
                raise
            raise UsageFault(f"{error}") from error
        rules = Rules(
            limits=limits.limits(),
            hide=hidden,
            network=network,
            clean_env=not env_all,
            env=tuple(env or ()),
            propose=propose,
            seconds_max=max_time or SECONDS_MAX_DEFAULT,
            seen_as=host_directories(),
        )
        with owned_workspace(workspace) as (space, owner):
            session = WorkspaceSession(space, owner, rules)

            def call() -> bool:
                if http is None:
                    serve_stdio(session)
                else:
                    serve_http(session, port=http, token=token)
                return True

            run_interruptible(call, is_done=bool)


_NOT_OF_SERVER = ("words", "scope", "dry_run", "workspace", "http", "token_file", "clean_env")


def _install(
    context: typer.Context, words: list[str], scope: Scope, workspace: Path | None, *, is_dry: bool
) -> None:
    """Writes the configuration of an agent."""
    from branching.cli.agent_files import (
        TOOL_SECONDS_MAX,
        installed_server,
        project_around,
        refuse_files_in_container,
        tell_written,
    )

    if words[0] != "install" or len(words) != 2 or words[1] not in AGENTS:
        raise UsageFault(f"write branching mcp install AGENT, one of {', '.join(AGENTS)}")
    refuse_files_in_container()
    project = project_around(workspace)
    is_named = workspace is not None
    written = installed_server(
        words[1],
        scope,
        project,
        _server_options(context),
        tool_seconds_max=ceil(context.params["max_time"] or TOOL_SECONDS_MAX),
        is_named=is_named,
        is_dry=is_dry,
    )
    tell_written(written, is_dry=is_dry)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _server_options(context: typer.Context) -> list[str]:
    """Returns the options of the server that were given, as words."""
    words: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in _NOT_OF_SERVER or not _is_given(context, name):
            continue
        value = context.params[name]
        if isinstance(value, bool):
            words += parameter.opts if value else parameter.secondary_opts
            continue
        for each in value if isinstance(value, (list, tuple)) else [value]:
            text = f"{each:g}" if isinstance(each, float) else str(each)
            words += [parameter.opts[0], text]
    return words


def _read_token(file: Path | None) -> str | None:
    """Returns the token of the file, or of the environment, from which it is taken: commands in
    branches must not find it there. ValueError for one that protects nothing.
    """
    told = os.environ.pop(TOKEN_VARIABLE, None)
    if file is not None:
        if stat.S_IMODE(file.stat().st_mode) & 0o077:
            raise ValueError(
                f"other users can read {file}, which contains the token; chmod 600 makes it private"
            )
        told = file.read_text(encoding="utf-8").strip()
    if told is not None and len(told) < TOKEN_CHARACTERS_MIN:
        raise ValueError(f"the token has less than {TOKEN_CHARACTERS_MIN} characters")
    return told
