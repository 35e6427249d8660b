"""The commands: one function each.

Options are in `front`, words in `words`, decisions in `plan`, deeds in `engine` and `warm`.
"""

from __future__ import annotations

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

from branching_docker.errors import SettingsError, WorkspaceError, WrapperError
from branching_docker.facts import EngineFacts
from branching_docker.front import Given, connect, front
from branching_docker.host_files import taken
from branching_docker.image import require_image
from branching_docker.inner import commands, wants_help
from branching_docker.names import COMMAND_VARIABLE, EXEC, RECOVER, command_name
from branching_docker.plan import checked_workspace, enter_options, is_settled, plan_run, plan_warm, refused_changes
from branching_docker.stamp import stamp
from branching_docker.store import go_on
from branching_docker.words import PASSED_ON, Untouched, Words

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from branching_docker.engine import Engine, Found
    from branching_docker.settings import Settings

EXAMPLE = "Example: branching-docker -w . speculate -c './fix-a && make test' -c './fix-b && make test'"
app = typer.Typer(
    cls=Words,
    invoke_without_command=True,
    add_completion=False,  # `completion` is a command
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain: the same text in a terminal, a file and docs/branching-docker.md
    help="Runs `branching` on a directory, in a container: what wins is written back, the rest is dropped.",
    epilog=EXAMPLE,
)
app.callback()(front)


@contextmanager
def reported() -> Iterator[None]:
    """Turns a failure of ours into its lines on standard error and its exit code."""
    try:
        yield
    except WrapperError as error:
        for line in error.lines():
            typer.echo(line, err=True)
        raise typer.Exit(error.exit_code) from error


def foreseen(settings: Settings, workspace: Path) -> tuple[Settings, EngineFacts]:
    """Returns what a plan needs, as of an ordinary engine where there is none: a dry run needs none."""
    try:
        at = connect(settings)
        facts = at.facts()
        return go_on(settings, workspace, at, facts), facts
    except WrapperError:
        return settings, EngineFacts(kind=settings.engine or "docker")


def place_of_branches(settings: Settings, workspace: Path, at: Engine) -> tuple[Settings, EngineFacts]:
    """Returns what a plan needs; says where it goes on with branches though nobody said where they are."""
    facts = at.facts()
    settled = go_on(settings, workspace, at, facts)
    if settled.store != settings.store:
        say(
            f'the branches of {workspace} have their place in the volume "{settled.store}": '
            f"going on there, as with --store {settled.store}."
        )
    return settled, facts


def say(text: str) -> None:
    """Tells what was done beside what was asked."""
    typer.echo(f"branching-docker: {text}", err=True)


def at_work(workspace: Path, at: Engine) -> list[Found]:
    """Returns the containers at work, and says what was removed that only stood in the way."""
    from branching_docker import warm

    return warm.at_work(workspace, at, environ=os.environ, say=say)


def pass_on(
    context: typer.Context, arguments: Annotated[list[str] | None, typer.Argument(metavar="...")] = None
) -> None:
    """Runs one of `branching`'s own commands, in the workspace's warm container or in one of its own."""
    given: Given = context.obj
    words = [str(context.command.name), *(arguments or [])]
    if wants_help(words[0], words[1:]):
        typer.echo(commands()[words[0]]["help"])
        return
    if words == ["ls"] and given.workspace is None:
        with reported():
            list_containers(given)
        return
    with reported():
        workspace = given.place(words[0])
        settings = given.settings(workspace)
        if settings.root and (owner := workspace.stat().st_uid) != 0:
            say(
                f"--root: commands run as root without capabilities, and {workspace} belongs to user {owner}: they can "
                "write only where everyone may."
            )
        call = taken(words)
        environ = {**os.environ, **call.variables}
        plan = partial(
            plan_run,
            call.words,
            workspace=workspace,
            name=f"branching-{os.urandom(4).hex()}",
            environ=environ,
            tty=os.isatty(0) and os.isatty(1) and not call.has_stream,
            variables=tuple(call.variables),
        )
        if given.is_dry_run:
            settings, facts = foreseen(settings, workspace)
            typer.echo(" ".join([shlex.join(plan(settings=settings, facts=facts).argv()), *call.shown()]))
            return
        from branching_docker import engine, warm

        at = connect(settings)
        found = warm.find_warm(workspace, at_work(workspace, at))
        if found is not None:
            variables = (f"{COMMAND_VARIABLE}={command_name(str(workspace))}", *call.variables)
            way = Way(given=given, settings=settings, at=at, found=found, environ=environ, variables=variables)
            raise typer.Exit(call.run(partial(enter, call.words, way)))
        require_image(at, settings)
        settings, facts = place_of_branches(settings, workspace, at)
        if sys.stdout:  # our own standard streams may have been closed
            sys.stdout.flush()
        settled = plan(settings=settings, facts=facts)
        if not call.has_stream:
            engine.become(settled, at, environ=environ)
        raise typer.Exit(call.run(partial(engine.run, settled, at, environ=environ)))


for name, summary in PASSED_ON.items():
    app.command(name, cls=Untouched, add_help_option=False, short_help=summary, help=summary)(pass_on)


@dataclass(frozen=True, kw_only=True)
class Way:
    """The way of one command into a warm container."""

    given: Given
    settings: Settings
    at: Engine
    found: Found
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    variables: tuple[str, ...] = ()
    """More of the command's environment; a name alone has the value of `environ`."""


def enter(words: list[str], way: Way) -> int:
    """Runs a command in the warm container, and returns its exit code."""
    from branching_docker import entry
    from branching_docker.attach import GONE

    found, at = way.found, way.at
    refused = refused_changes(found.warm_settings or "{}", way.given.flags)
    if refused:
        raise WorkspaceError(
            f"the warm container of {found.workspace} was made without {' '.join(refused)}.",
            hint="leave that away, or end the container first: branching-docker -w DIR down",
        )
    inside = entry.inner_words(words)
    if inside is None:
        raise typer.BadParameter("which command? exec -- CMD...", param_hint="CMD")
    code = entry.enter(
        inside,
        docker=at.command,
        container=found.identifier,
        environ=way.environ,
        options=enter_options(way.settings, *way.variables),
        at=at.socket_path,
    )
    if code == GONE:
        settle(Path(found.workspace), way.settings, at)
    return code


def settle(workspace: Path, settings: Settings, at: Engine) -> None:
    """Recovers a directory whose container was killed in the middle of a commit, and says what was done."""
    from branching_docker import recovery, warm

    # A container that was killed a moment ago may still count as running; in one that runs on, a commit ends by itself.
    deadline = time.monotonic() + warm.FREE_SECONDS_MAX
    while recovery.is_interrupted(workspace) and warm.find_warm(workspace, at_work(workspace, at)) is not None:
        if time.monotonic() > deadline:
            return
        time.sleep(warm.POLL_SECONDS)
    if not recovery.is_interrupted(workspace):
        return
    require_image(at, settings)
    settings, facts = place_of_branches(settings, workspace, at)
    plan = recovery.plan_recovery(workspace, settings=settings, facts=facts)
    done = recovery.recover(plan, docker=at.command, environ=os.environ)
    if done != recovery.NOTHING:
        say(f"the container was killed in a commit: {done}.")


@app.command(RECOVER)
def recover(context: typer.Context) -> None:
    """Finish or take back a commit that was interrupted because its container was killed.

    Every command on DIR does this by itself when it starts.
    """
    from branching_docker.recovery import is_interrupted

    given: Given = context.obj
    with reported():
        workspace = given.place(RECOVER)
        settings = given.settings(workspace)
        if not is_interrupted(workspace):
            say(f"{workspace}: nothing to recover.")
            return
        settle(workspace, settings, connect(settings))


@app.command()
def up(context: typer.Context) -> None:
    """Start a warm container on DIR: later commands on DIR run in it, without a container's start.

    It ends by `down`, or when it was idle for --idle.
    """
    given: Given = context.obj
    with reported():
        workspace = given.place("up")
        # Before the files are read: what changes them meanwhile changes the stamp.
        files = stamp(str(workspace), os.environ) if given.flags["env"] is None else ""
        settings = given.settings(workspace)
        files = files if is_settled(settings) else ""
        settings = replace(settings, root=False)
        if settings.user:
            raise SettingsError(
                "a warm container cannot have --user: docker exec would not come into its user namespace.",
                hint="leave it away: commands run as the owner of the directory",
            )
        if given.is_dry_run:
            settings, facts = foreseen(settings, workspace)
            plan = plan_warm(workspace=workspace, settings=settings, facts=facts, stamp=files)
            typer.echo(shlex.join(plan.argv()))
            return
        from branching_docker import warm

        at = connect(settings)
        found = warm.find_warm(workspace, at_work(workspace, at))
        if found is not None:
            refused = refused_changes(found.warm_settings or "{}", given.flags)
            if refused:
                raise WorkspaceError(
                    f"{found.name} is up, but was made without {' '.join(refused)}.",
                    hint="end it first: branching-docker -w DIR down",
                )
        else:
            require_image(at, settings)
            settings, facts = place_of_branches(settings, workspace, at)
            plan = plan_warm(workspace=workspace, settings=settings, facts=facts, stamp=files)
            name = warm.up_or_share(plan, at, environ=os.environ, say=say)
        typer.echo(found.name if found else name)


@app.command(EXEC, cls=Untouched, add_help_option=False)
def execute(
    context: typer.Context, command: Annotated[list[str] | None, typer.Argument(metavar="-- CMD...")] = None
) -> None:
    """Run any command in DIR's warm container, as DIR's owner. It sees what is committed; changes are not branched."""
    given: Given = context.obj
    if (command or [])[:1] in (["-h"], ["--help"]):
        typer.echo(context.get_help())
        return
    with reported():
        workspace = given.place(EXEC)
        settings = given.settings(workspace)
        from branching_docker import warm

        at = connect(settings)
        found = warm.find_warm(workspace, at_work(workspace, at))
        if found is None:
            raise WorkspaceError(
                f"no warm container works on {workspace}.", hint="start one first: branching-docker -w DIR up"
            )
        way = Way(given=given, settings=settings, at=at, found=found)
        raise typer.Exit(enter([EXEC, *(command or [])], way))


@app.command()
def down(context: typer.Context) -> None:
    """End DIR's warm container. Commands in it are ended first; kept branches stay."""
    given: Given = context.obj
    with reported():
        from branching_docker import warm

        if given.workspace is None:
            given.place("down")
        workspace = warm.real(Path(given.workspace or ""))
        at = connect(given.settings())
        for one in at.containers():
            if one.workspace == str(workspace) and one.warm_settings is not None:
                warm.down(one, docker=at.command, environ=os.environ)
                typer.echo(one.name)
                return
        say(f"no warm container works on {workspace}.")


def list_containers(given: Given) -> None:
    """Prints the containers at work."""
    from branching_docker import warm

    found = connect(given.settings()).containers()
    for line in warm.describe([one for one in found if not one.has_ended]):
        typer.echo(line)


@app.command()
def build(
    context: typer.Context,
    source: Annotated[
        Path | None,
        typer.Argument(metavar="[SOURCE]", help="Source tree of branching.  [default: what came with this program]"),
    ] = None,
) -> None:
    """Build the image."""
    with reported():
        from branching_docker import engine

        settings = context.obj.settings()
        engine.build(connect(settings), engine.build_context(source), settings.image, environ=os.environ)


@app.command()
def pull(context: typer.Context) -> None:
    """Pull the image from its registry."""
    with reported():
        from branching_docker import engine

        settings = context.obj.settings()
        engine.pull(connect(settings), settings.image, environ=os.environ)


@app.command()
def doctor(context: typer.Context) -> None:
    """Check the engine, the image and what works inside, and with -w the directory.

    Each line is ok, or says what to do. Exit code: 0 everything that is needed works, 1 something is missing.
    """
    given: Given = context.obj
    with reported():
        from branching_docker.doctor import examine

        workspace = None if given.workspace is None else checked_workspace(given.workspace)
        settings = given.settings(workspace)
        found = examine(settings, lambda: connect(settings), workspace, environ=os.environ)
    for finding in found:
        for line in finding.lines():
            typer.echo(line)
    raise typer.Exit(any(finding.state == "missing" for finding in found))


@app.command()
def completion(
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="The shell to write it for.")] = "bash",
) -> None:
    """Print a script that completes our commands and options in a shell.

    For bash: branching-docker completion bash >>~/.bash_completion
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    if shell not in ("bash", "zsh", "fish"):
        raise typer.BadParameter(f"{shell} is none of bash, zsh, fish", param_hint="SHELL")
    script = get_completion_script(prog_name="branching-docker", complete_var="_BRANCHING_DOCKER_COMPLETE", shell=shell)
    typer.echo(script)
