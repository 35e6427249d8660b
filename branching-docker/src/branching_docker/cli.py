"""The command line: which words mean what.

One function a command; decisions are in `plan`, deeds in `engine` and `warm`.

What follows the name of one of `branching`'s own commands is that command's affair and reaches it untouched, whatever
it looks like: options, `-h`, and every `--`. A name we do not know is the image's affair too: it may have newer ones.
"""

from __future__ import annotations

import copy
import os
import re
import shlex
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from branching_docker import __version__
from branching_docker.errors import ImageError, SettingsError, WorkspaceError, WrapperError
from branching_docker.facts import EngineFacts
from branching_docker.names import EXEC, VERSION_LABEL
from branching_docker.plan import checked_workspace, enter_options, is_settled, plan_run, plan_warm, refused_changes
from branching_docker.settings import DRIVERS, ENGINES, IMAGE_DEFAULT, PULLS, Settings, gather
from branching_docker.stamp import stamp
from branching_docker.store import go_on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from branching_docker.engine import Engine, Found

EXAMPLE = "Example: branching-docker -w . speculate -c './fix-a && make test' -c './fix-b && make test'"
PASSED_ON = {
    "run": "Run a command in a branch; commit when it succeeds.",
    "speculate": "Race several commands; commit the first that succeeds.",
    "best-of-n": "Run a command N times; commit the best score.",
    "reflexion": "Try again with the critique of the failed attempt.",
    "status": "Show the workspace and its branches.",
    "ls": "List the branches that are kept; without -w, the containers at work.",
    "diff": "Show what a kept branch changes.",
    "commit": "Commit a kept branch.",
    "abort": "Drop a kept branch.",
    "shell": "Enter a branch with a shell.",
    "mcp": "Serve branches as tools of an agent.",
}
COMMAND_NAME = re.compile(r"[a-z][a-z0-9-]*")


class Untouched(TyperCommand):
    """A command whose arguments are not ours: a `--` of our own in front stops the parser at once."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses nothing."""
        return super().parse_args(ctx, ["--", *args])


class Words(TyperGroup):
    """The commands: ours, those of the image that we know, and any other word, which the image will judge."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns the command of that name."""
        known = super().get_command(ctx, cmd_name)
        if known is not None or not COMMAND_NAME.fullmatch(cmd_name):
            return known
        unknown = copy.copy(super().get_command(ctx, "run"))
        if unknown is not None:
            unknown.name = cmd_name
        return unknown


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


@dataclass(frozen=True, kw_only=True)
class Given:
    """What stood in front of the command."""

    workspace: Path | None
    flags: dict[str, Any]
    is_dry_run: bool

    def settings(self, workspace: Path | None = None) -> Settings:
        """Returns the settings, the directory's own included."""
        return gather(self.flags, environ=os.environ, workspace=workspace)

    def place(self, command: str) -> Path:
        """Returns the directory to work on, checked."""
        if self.workspace is None:
            message = f"which directory? Put -w DIR in front of the command: branching-docker -w . {command} ..."
            raise typer.BadParameter(message, param_hint="-w")
        return checked_workspace(self.workspace)


@contextmanager
def reported() -> Iterator[None]:
    """Turns a failure of ours into its lines on standard error and its exit code."""
    try:
        yield
    except WrapperError as error:
        for line in error.lines():
            typer.echo(line, err=True)
        raise typer.Exit(error.exit_code) from error


def connect(settings: Settings) -> Engine:
    """Returns the engine that the settings mean."""
    from branching_docker import engine

    return engine.connect(settings.engine, environ=os.environ)


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
        typer.echo(
            f'branching-docker: the branches of {workspace} have their place in the volume "{settled.store}": '
            f"going on there, as with --store {settled.store}.",
            err=True,
        )
    return settled, facts


def option(*names: str, value: str, text: str, parser: Callable[[str], Any] | None = None) -> Any:
    """Declares an option that stands in front of the command."""
    return typer.Option(*names, metavar=value, help=text, show_default=False, parser=parser)


def directory(text: str) -> Path:
    """Returns the path; an empty one would be where we stand, and comes of a variable that was not set."""
    if not text:
        raise typer.BadParameter("the directory's name is empty; the one you stand in is -w .")
    return Path(text)


@app.callback()
def front(
    context: typer.Context,
    workspace: Annotated[
        Path | None,
        option(
            "-w",
            "--workspace",
            value="DIR",
            text="The directory to work on; commits are written to it.",
            parser=directory,
        ),
    ] = None,
    image: Annotated[
        str | None, option("--image", value="NAME", text=f"The image to run.  [default: {IMAGE_DEFAULT}]")
    ] = None,
    env: Annotated[list[str] | None, option("-e", "--env", value="NAME=VALUE", text="Set a variable.")] = None,
    env_file: Annotated[list[str] | None, option("--env-file", value="FILE", text="Set variables from a file.")] = None,
    volume: Annotated[
        list[str] | None, option("-v", "--volume", value="SOURCE:PLACE", text="Mount a volume or directory.")
    ] = None,
    store: Annotated[
        str | None,
        option(
            "--store",
            value="VOLUME|auto",
            text="Keep branches in this volume; auto: in one for DIR.  [default: in DIR, on Linux]",
        ),
    ] = None,
    publish: Annotated[list[str] | None, option("-p", "--publish", value="PORT", text="Publish a port.")] = None,
    network: Annotated[str | None, option("--network", value="NAME", text="Connect to a network, or none.")] = None,
    user: Annotated[
        str | None,
        option("-u", "--user", value="UID[:GID]", text="Run the container as this user, who must own DIR."),
    ] = None,
    root: Annotated[
        bool | None, typer.Option("--root", help="Run commands as root, not as DIR's owner.", show_default=False)
    ] = None,
    memory: Annotated[str | None, option("-m", "--memory", value="SIZE", text="Limit the container's memory.")] = None,
    cpus: Annotated[str | None, option("--cpus", value="N", text="Limit the container's processor time.")] = None,
    pids_limit: Annotated[str | None, option("--pids-limit", value="N", text="Limit the number of processes.")] = None,
    platform: Annotated[str | None, option("--platform", value="OS/ARCH", text="The image's platform.")] = None,
    pull: Annotated[
        str | None, option("--pull", value="|".join(PULLS), text="When to pull the image.  [default: never]")
    ] = None,
    name: Annotated[str | None, option("--name", value="NAME", text="The container's name.")] = None,
    driver: Annotated[
        str | None,
        option("--driver", value="|".join(DRIVERS), text="What presents a branch as a directory.  [default: auto]"),
    ] = None,
    idle: Annotated[
        str | None, option("--idle", value="TIME", text="End a warm container that idles so long.  [default: 30m]")
    ] = None,
    engine: Annotated[
        str | None, option("--engine", value="|".join(ENGINES), text="Whose command to use.  [default: what is there]")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the docker command instead of running it.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the versions, ours and the image's, and exit.")
    ] = False,
) -> None:
    """Keeps the options that stand in front of the command."""
    flags = {
        "image": image,
        "env": env or None,
        "env_file": env_file or None,
        "volume": volume or None,
        "store": store,
        "publish": publish or None,
        "network": network,
        "user": user,
        "root": root,
        "memory": memory,
        "cpus": cpus,
        "pids_limit": pids_limit,
        "platform": platform,
        "pull": pull,
        "name": name,
        "driver": driver,
        "idle": idle,
        "engine": engine,
    }
    context.obj = Given(workspace=workspace, flags=flags, is_dry_run=dry_run)
    if version:
        show_versions(context.obj)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def show_versions(given: Given) -> None:
    """Prints our version, and the image's where there is one to ask."""
    typer.echo(f"branching-docker {__version__}")
    try:
        settings = given.settings()
        labels = connect(settings).image_labels(settings.image)
    except WrapperError:
        return  # without an engine there is no image either
    if labels is not None:
        typer.echo(f"image {settings.image} {labels.get(VERSION_LABEL, 'of unknown version')}")
        warn_of_version(settings.image, labels)


def warn_of_version(image: str, labels: dict[str, str]) -> None:
    """Says on standard error when the image was made for another version of us."""
    theirs = labels.get(VERSION_LABEL)
    if theirs != __version__:
        typer.echo(
            f'branching-docker: warning: this is version {__version__}, the image "{image}" has {theirs or "none"}. '
            "branching-docker build SOURCE_TREE makes the image that fits.",
            err=True,
        )


def pass_on(
    context: typer.Context, arguments: Annotated[list[str] | None, typer.Argument(metavar="...")] = None
) -> None:
    """Runs one of `branching`'s own commands, in the workspace's warm container or in one of its own."""
    given: Given = context.obj
    words = [str(context.command.name), *(arguments or [])]
    if words == ["ls"] and given.workspace is None:
        with reported():
            list_containers(given)
        return
    with reported():
        workspace = given.place(words[0])
        settings = given.settings(workspace)
        plan = partial(
            plan_run,
            words,
            workspace=workspace,
            name=f"branching-{os.urandom(4).hex()}",
            environ=os.environ,
            tty=sys.stdin.isatty() and sys.stdout.isatty(),
        )
        if given.is_dry_run:
            settings, facts = foreseen(settings, workspace)
            typer.echo(shlex.join(plan(settings=settings, facts=facts).argv()))
            return
        from branching_docker import engine, warm

        at = connect(settings)
        found = warm.find_warm(workspace, at.containers())
        if found is not None:
            enter(words, given=given, settings=settings, at=at, found=found)
        require_image(at, settings)
        settings, facts = place_of_branches(settings, workspace, at)
        sys.stdout.flush()
        engine.become(plan(settings=settings, facts=facts), at, environ=os.environ)


for name, summary in PASSED_ON.items():
    note = f"Everything after the name goes to it: branching-docker -w . {name} --help"
    app.command(name, cls=Untouched, add_help_option=False, short_help=summary, help=f"{summary} {note}")(pass_on)


def enter(words: list[str], *, given: Given, settings: Settings, at: Engine, found: Found) -> None:
    """Runs a command in the warm container, and exits with its code."""
    from branching_docker import entry

    refused = refused_changes(found.warm_settings or "{}", given.flags)
    if refused:
        raise WorkspaceError(
            f"the warm container of {found.workspace} was made without {' '.join(refused)}.",
            hint="leave that away, or end the container first: branching-docker -w DIR down",
        )
    inside = entry.inner_words(words)
    if inside is None:
        raise typer.BadParameter("which command? exec -- CMD...", param_hint="CMD")
    options = enter_options(settings)
    raise typer.Exit(
        entry.enter(
            inside,
            docker=at.command,
            container=found.identifier,
            environ=os.environ,
            options=options,
            at=at.socket_path,
        )
    )


def require_image(at: Engine, settings: Settings) -> None:
    """Returns if the engine has the image, or may pull it; warns of one that is not of our version."""
    labels = at.image_labels(settings.image)
    if labels is not None:
        warn_of_version(settings.image, labels)
    elif settings.pull == "never":
        raise ImageError(
            f'the image "{settings.image}" is not on this machine.',
            hint=f"branching-docker build SOURCE_TREE, or docker pull {settings.image}, "
            "or name another by BRANCHING_IMAGE",
        )


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
        found = warm.find_warm(workspace, at.containers())
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
            warm.up(plan, docker=at.command, environ=os.environ)
        typer.echo(found.name if found else plan.name)


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
        found = warm.find_warm(workspace, at.containers())
        if found is None:
            raise WorkspaceError(
                f"no warm container works on {workspace}.", hint="start one first: branching-docker -w DIR up"
            )
        enter([EXEC, *(command or [])], given=given, settings=settings, at=at, found=found)


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
        typer.echo(f"branching-docker: no warm container works on {workspace}.", err=True)


def list_containers(given: Given) -> None:
    """Prints the containers at work."""
    from branching_docker import warm

    for line in warm.describe(connect(given.settings()).containers()):
        typer.echo(line)


@app.command()
def build(
    context: typer.Context,
    source: Annotated[
        Path | None,
        typer.Argument(metavar="[SOURCE]", help="BranchContext's source tree.  [default: what came with this program]"),
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
