"""The commands: one function each.

Global options are in `options`, the names of commands in `commands`, decisions in `plan`. `engine`, `container_run`,
`warm_container` and `warm_exec` carry them out.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from branching_docker import container_run, image, recovery, warm_container
from branching_docker.commands import FORWARDED_COMMANDS, GROUPS, CommandGroup, PassthroughCommand
from branching_docker.constants import (
    COMMAND_VARIABLE,
    EXEC,
    INNER_SETTINGS_CHARACTERS_MAX,
    INNER_SETTINGS_VARIABLE,
    RECOVER,
    START_VARIABLE,
    command_name,
    inner_settings_path,
)
from branching_docker.doctor import examine
from branching_docker.engine_api import CONTAINER_KILLED
from branching_docker.engine_info import EngineInfo
from branching_docker.errors import SettingsError, WorkspaceError, WrapperError
from branching_docker.fingerprint import config_fingerprint
from branching_docker.host_files import extract_host_file
from branching_docker.inner import commands, wants_help
from branching_docker.options import GlobalOptions, connect, global_options
from branching_docker.plan import checked_workspace, exec_options, is_settled, plan_run, plan_warm, refused_changes
from branching_docker.project_image import AGENT_PACKAGES, plan_project_image
from branching_docker.store_volume import resolve_store
from branching_docker.warm_exec import container_words, run_in_container

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from branching_docker.engine import Engine, WorkspaceContainer
    from branching_docker.settings import Settings

EXAMPLE = "Example: branching-docker -w . speculate -c './fix-a && make test' -c './fix-b && make test'"
CONTAINER_GROUP = "Container"
SETUP_GROUP = "Set up"
"""Groups of the help."""
app = typer.Typer(
    cls=CommandGroup,
    invoke_without_command=True,
    add_completion=False,  # `completion` is a command
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain: the same text in a terminal, a file and docs/branching-docker.md
    help="Run `branching` in a container. Winning changes are written back to DIR; everything else is discarded.",
    epilog=EXAMPLE,
)
app.callback()(global_options)


@contextmanager
def handle_errors() -> Iterator[None]:
    """Reports a WrapperError on standard error, and exits with its code."""
    try:
        yield
    except WrapperError as error:
        for line in error.lines():
            typer.echo(line, err=True)
        raise typer.Exit(error.exit_code) from error


def dry_run_settings(settings: Settings, workspace: Path) -> tuple[Settings, EngineInfo]:
    """Returns what a dry run's plan needs, without an engine that of an ordinary one."""
    try:
        engine = connect(settings)
        info = engine.info()
        return resolve_store(settings, workspace, engine, info), info
    except WrapperError:
        return settings, EngineInfo(kind=settings.engine or "docker")


def plan_settings(settings: Settings, workspace: Path, engine: Engine) -> tuple[Settings, EngineInfo]:
    """Returns what a plan needs; reports a volume with branches that no setting names."""
    info = engine.info()
    settled = resolve_store(settings, workspace, engine, info)
    if settled.store != settings.store:
        say(
            f'the branches of {workspace} are stored in the volume "{settled.store}"; continuing there, as with '
            f"--store {settled.store}."
        )
    return settled, info


def say(text: str) -> None:
    """Reports on standard error."""
    typer.echo(f"branching-docker: {text}", err=True)


def find_warm(workspace: Path, engine: Engine) -> WorkspaceContainer | None:
    """Returns the workspace's warm container; reports containers that were removed because they had not started."""
    return warm_container.find_warm(workspace, warm_container.active_containers(workspace, engine, say=say))


def forward(
    context: typer.Context, arguments: Annotated[list[str] | None, typer.Argument(metavar="...")] = None
) -> None:
    """Runs one of `branching`'s own commands, in the workspace's warm container or in one of its own."""
    options: GlobalOptions = context.obj
    words = [str(context.command.name), *(arguments or [])]
    if wants_help(words[0], words[1:]):
        typer.echo(commands()[words[0]]["help"])
        return
    with handle_errors():
        if words == ["ls"] and options.workspace is None and not options.is_dry_run:
            list_containers(options)
        workspace = options.checked_workspace()
        settings = options.settings(workspace)
        if settings.root and (owner := workspace.stat().st_uid) != 0:
            say(
                f"--root: commands run as root without capabilities, and {workspace} belongs to user {owner}: they "
                "can write only where all users can."
            )
        call = extract_host_file(words)
        call = replace(call, variables={**call.variables, **inner_settings()})
        environ = {**os.environ, **call.variables}
        plan = partial(
            plan_run,
            call.words,
            workspace=workspace,
            name=f"branching-{os.urandom(4).hex()}",
            environ=environ,
            tty=os.isatty(0) and os.isatty(1) and not call.has_stream,
            variables=(*call.variables, *start_variables(workspace)),
            caches=call.caches,
        )
        if options.is_dry_run:
            settings, info = dry_run_settings(settings, workspace)
            typer.echo(" ".join([shlex.join(plan(settings=settings, info=info).argv()), *call.shown()]))
            return
        engine = connect(settings)
        container = find_warm(workspace, engine)
        if container is not None:
            variables = (f"{COMMAND_VARIABLE}={command_name(str(workspace))}", *call.variables)
            variables += start_variables(workspace)
            target = WarmTarget(options, settings, engine, container, environ, variables)
            refuse_caches(call.caches, container)
            code = call.run(partial(exec_warm, call.words, target))
            if call.report is not None:
                call.take_report(partial(exec_warm, call.report_words, target))
            raise typer.Exit(code)
        image.require_image(engine, settings, workspace)
        settings, info = plan_settings(settings, workspace, engine)
        if sys.stdout:  # our standard streams may be closed
            sys.stdout.flush()
        settled = plan(settings=settings, info=info)
        if not call.has_stream and call.report is None:
            container_run.exec_docker(settled, engine, environ=environ)
        code = call.run(partial(container_run.run, settled, engine, environ=environ))
        if call.report is not None:
            name = f"branching-{os.urandom(4).hex()}"
            again = replace(settled, arguments=tuple(call.report_words), name=name, tty=False)
            call.take_report(partial(container_run.run, again, engine, environ=environ))
        raise typer.Exit(code)


def start_variables(workspace: Path) -> tuple[str, ...]:
    """Returns the variable with the place in the directory where the caller is, if it is below the directory."""
    try:
        place = Path(os.path.realpath("."))
    except OSError:
        return ()
    if place == workspace or not place.is_relative_to(workspace):
        return ()
    return (f"{START_VARIABLE}={place.relative_to(workspace)}",)


def inner_settings() -> dict[str, str]:
    """Returns the variable with the content of the user's settings file of `branching`, if there is one.

    Raises:
        SettingsError: the file cannot be read.
    """
    path = inner_settings_path(os.environ)
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123
            text = file.read(INNER_SETTINGS_CHARACTERS_MAX + 1)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read.", cause=str(error), hint="move it away, or correct it") from error
    if len(text) > INNER_SETTINGS_CHARACTERS_MAX:
        raise SettingsError(f"{path} is too long for a container.", hint="shorten it")
    return {INNER_SETTINGS_VARIABLE: text} if text.strip() else {}


def refuse_caches(caches: tuple[str, ...], container: WorkspaceContainer) -> None:
    """Raises WorkspaceError if the warm container lacks the mount of a cache."""
    volumes = json.loads(container.warm_settings or "{}").get("volume", [])
    for cache in caches:
        if f"{cache}:{cache}" not in volumes:
            volume = shlex.quote(f"{cache}:{cache}")
            raise WorkspaceError(
                f"the warm container of {container.workspace} was made without the cache {cache}.",
                hint=f"end it (branching-docker -w DIR down), and start it with -v {volume}",
            )


for name, summary in FORWARDED_COMMANDS.items():
    app.command(
        name,
        cls=PassthroughCommand,
        add_help_option=False,
        short_help=summary,
        help=summary,
        rich_help_panel=GROUPS[name],
    )(forward)


@dataclass(frozen=True)
class WarmTarget:
    """A warm container, and what a command in it is given."""

    options: GlobalOptions
    settings: Settings
    engine: Engine
    container: WorkspaceContainer
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    variables: tuple[str, ...] = ()
    """Further variables of the command; a name alone has the value of `environ`."""


def exec_warm(words: list[str], target: WarmTarget) -> int:
    """Runs a command in the warm container, and returns its exit code."""
    container, engine = target.container, target.engine
    refused = refused_changes(container.warm_settings or "{}", target.options.flags)
    if refused:
        raise WorkspaceError(
            f"the warm container of {container.workspace} was made without {' '.join(refused)}.",
            hint="leave these options out, or end the container first: branching-docker -w DIR down",
        )
    inside = container_words(words)
    if inside is None:
        raise typer.BadParameter("which command? exec -- CMD...", param_hint="CMD")
    code = run_in_container(
        inside,
        docker=engine.command,
        container=container.identifier,
        environ=target.environ,
        options=exec_options(target.settings, *target.variables),
        at=engine.socket_path,
    )
    if code == CONTAINER_KILLED:
        settle(Path(container.workspace), target.settings, engine)
    return code


def settle(workspace: Path, settings: Settings, engine: Engine) -> None:
    """Recovers a directory whose container was killed in the middle of a commit, and reports the result."""
    # A container that was killed a moment ago may still count as running; in one that runs on, a commit ends by itself.
    deadline = time.monotonic() + warm_container.FREE_SECONDS_MAX
    while recovery.is_interrupted(workspace) and find_warm(workspace, engine) is not None:
        if time.monotonic() > deadline:
            return
        time.sleep(warm_container.POLL_SECONDS)
    if not recovery.is_interrupted(workspace):
        return
    image.require_image(engine, settings, workspace)
    settings, info = plan_settings(settings, workspace, engine)
    plan = recovery.plan_recovery(workspace, settings=settings, info=info)
    done = recovery.recover(plan, docker=engine.command, environ=os.environ)
    if done != recovery.NOTHING:
        say(f"the container was killed during a commit: {done}.")


@app.command(RECOVER, rich_help_panel=CONTAINER_GROUP)
def recover(context: typer.Context) -> None:
    """Finish or take back a commit that was interrupted because its container was killed.

    Every command on DIR does this by itself when it starts.
    """
    options: GlobalOptions = context.obj
    with handle_errors():
        workspace = options.checked_workspace()
        settings = options.settings(workspace)
        if not recovery.is_interrupted(workspace):
            say(f"{workspace}: nothing to recover.")
            return
        settle(workspace, settings, connect(settings))


@app.command(rich_help_panel=CONTAINER_GROUP)
def up(context: typer.Context) -> None:
    """Start a warm container on DIR: later commands on DIR run in it, without a container's start.

    It ends by `down`, or when it was idle for --idle.
    """
    options: GlobalOptions = context.obj
    with handle_errors():
        workspace = options.checked_workspace()
        # Before the files are read: what changes them meanwhile changes the fingerprint.
        files = config_fingerprint(str(workspace), os.environ) if options.flags.get("env") is None else ""
        settings = options.settings(workspace)
        files = files if is_settled(settings) else ""
        settings = replace(settings, root=False)
        if settings.user:
            raise SettingsError(
                "a warm container cannot have --user: docker exec could not enter its user namespace.",
                hint="remove it: commands run as the owner of the directory",
            )
        if options.is_dry_run:
            settings, info = dry_run_settings(settings, workspace)
            plan = plan_warm(workspace=workspace, settings=settings, info=info, fingerprint=files)
            typer.echo(shlex.join(plan.argv()))
            return
        engine = connect(settings)
        container = find_warm(workspace, engine)
        if container is not None:
            refused = refused_changes(container.warm_settings or "{}", options.flags)
            if refused:
                raise WorkspaceError(
                    f"{container.name} is up, but was made without {' '.join(refused)}.",
                    hint="end it first: branching-docker -w DIR down",
                )
        else:
            image.require_image(engine, settings, workspace)
            settings, info = plan_settings(settings, workspace, engine)
            plan = plan_warm(workspace=workspace, settings=settings, info=info, fingerprint=files)
            name = warm_container.up_or_share(plan, engine, environ=os.environ, say=say)
        typer.echo(container.name if container else name)


@app.command(EXEC, cls=PassthroughCommand, add_help_option=False, rich_help_panel=CONTAINER_GROUP)
def execute(
    context: typer.Context, command: Annotated[list[str] | None, typer.Argument(metavar="-- CMD...")] = None
) -> None:
    """Run any command in DIR's warm container, as DIR's owner. It sees what is committed; changes are not branched."""
    options: GlobalOptions = context.obj
    if (command or [])[:1] in (["-h"], ["--help"]):
        typer.echo(context.get_help())
        return
    with handle_errors():
        workspace = options.checked_workspace()
        settings = options.settings(workspace)
        engine = connect(settings)
        container = find_warm(workspace, engine)
        if container is None:
            raise WorkspaceError(
                f"no warm container works on {workspace}.", hint="start one first: branching-docker -w DIR up"
            )
        target = WarmTarget(options, settings, engine, container)
        raise typer.Exit(exec_warm([EXEC, *(command or [])], target))


@app.command(rich_help_panel=CONTAINER_GROUP)
def down(context: typer.Context) -> None:
    """End DIR's warm container. Commands in it are ended first; kept branches stay."""
    options: GlobalOptions = context.obj
    with handle_errors():
        workspace = warm_container.realpath(Path(options.workspace or ""))
        engine = connect(options.settings())
        for one in engine.containers():
            if one.workspace == str(workspace) and one.warm_settings is not None:
                warm_container.down(one, engine)
                typer.echo(one.name)
                return
        say(f"no warm container works on {workspace}.")


def list_containers(options: GlobalOptions) -> None:
    """Prints the running containers of all directories, above the branches of this one."""
    found = [one for one in connect(options.settings()).containers() if not one.has_ended]
    for line in warm_container.describe(found):
        typer.echo(line)
    if found and sys.stdout:  # our standard streams may be closed
        typer.echo()
        sys.stdout.flush()  # the list of branches is another process's


@app.command(rich_help_panel=SETUP_GROUP)
def init(
    context: typer.Context,
    agent: Annotated[
        list[str] | None,
        typer.Option(
            "--agent",
            metavar="NAME",
            help=f"Install this agent, too: {', '.join(AGENT_PACKAGES)}. May be given several times.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a Dockerfile with the tools of DIR's project: Python, Rust, Node, agents.

    It also writes branching-docker.toml, so that later commands on DIR use the image. The commands that build and use
    it are printed. No file is replaced. DIR is the current directory without -w.
    """
    options: GlobalOptions = context.obj
    agents = agent or []
    for name in agents:
        if name not in AGENT_PACKAGES:
            raise typer.BadParameter(
                f"unknown agent {name}; choose one of {', '.join(AGENT_PACKAGES)}", param_hint="--agent"
            )
    with handle_errors():
        workspace = options.checked_workspace()
        settings = options.settings()
        planned = plan_project_image(workspace, base=settings.image, agents=agents)
        if options.is_dry_run:
            typer.echo("\n".join(f"# {name}\n{text}" for name, text in planned.files.items()), nl=False)
            return
        planned.write()
    say(f"found {', '.join(planned.languages) or 'no Python, Rust or Node'}; wrote {', '.join(planned.files)}. Next:")
    typer.echo("\n".join(planned.next_steps(settings.engine or "docker")))


@app.command(rich_help_panel=SETUP_GROUP)
def build(
    context: typer.Context,
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="[SOURCE]", help="Source tree of branching.  [default: the sources installed with this program]"
        ),
    ] = None,
) -> None:
    """Build the image."""
    with handle_errors():
        settings = context.obj.settings()
        image.build(connect(settings), image.build_context(source), settings.image, environ=os.environ)


@app.command(rich_help_panel=SETUP_GROUP)
def pull(context: typer.Context) -> None:
    """Pull the image from its registry."""
    with handle_errors():
        settings = context.obj.settings()
        connect(settings).pull(settings.image)


@app.command(rich_help_panel=SETUP_GROUP)
def doctor(context: typer.Context) -> None:
    """Check the engine, the image and what works inside, and with -w the directory.

    Each line is ok, or says what to do. Exit code: 0 everything that is needed works, 1 something is missing.
    """
    options: GlobalOptions = context.obj
    with handle_errors():
        workspace = None if options.workspace is None else checked_workspace(options.workspace)
        settings = options.settings(workspace)
        found = examine(settings, lambda: connect(settings), workspace, environ=os.environ)
    for finding in found:
        for line in finding.lines():
            typer.echo(line)
    raise typer.Exit(any(finding.state == "missing" for finding in found))


@app.command(rich_help_panel=SETUP_GROUP)
def completion(
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="The shell to print the script for.")] = "bash",
) -> None:
    """Print a script that completes our commands and options in a shell.

    For bash: branching-docker completion bash >>~/.bash_completion
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    if shell not in ("bash", "zsh", "fish"):
        raise typer.BadParameter(f"unknown shell {shell}; choose bash, zsh or fish", param_hint="SHELL")
    script = get_completion_script(prog_name="branching-docker", complete_var="_BRANCHING_DOCKER_COMPLETE", shell=shell)
    typer.echo(script)
