"""The global options, which stand before the command.

They are one source of the settings; the others are variables and files.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from branching_docker import __version__
from branching_docker.constants import VERSION_LABEL
from branching_docker.engine import connect as connect_engine
from branching_docker.errors import WrapperError
from branching_docker.image import warn_of_version
from branching_docker.plan import checked_workspace
from branching_docker.settings import DRIVERS, ENGINES, IMAGE_DEFAULT, NAMES, POLICIES, PULLS, Settings, gather

if TYPE_CHECKING:
    from collections.abc import Callable

    from branching_docker.engine import Engine


@dataclass(frozen=True, kw_only=True)
class GlobalOptions:
    """The options before the command, as they were given."""

    workspace: Path | None
    flags: dict[str, Any]
    is_dry_run: bool

    def settings(self, workspace: Path | None = None) -> Settings:
        """Returns the settings of all sources; a workspace adds its own file."""
        return gather(self.flags, environ=os.environ, workspace=workspace)

    def checked_workspace(self) -> Path:
        """Returns the directory to work on, by default the current one; raises WorkspaceError if it cannot be used."""
        return checked_workspace(Path() if self.workspace is None else self.workspace)


def connect(settings: Settings) -> Engine:
    """Returns the engine that the settings name."""
    return connect_engine(settings.engine, environ=os.environ)


def show_versions(options: GlobalOptions) -> None:
    """Prints the version of this program, and that of the image where there is one."""
    typer.echo(f"branching-docker {__version__}")
    try:
        settings = options.settings()
        labels = connect(settings).image_labels(settings.image)
    except WrapperError:
        return  # without an engine there is no image either
    if labels is not None:
        typer.echo(f"image {settings.image} {labels.get(VERSION_LABEL, 'of unknown version')}")
        warn_of_version(settings.image, labels)


def option(*names: str, value: str, text: str, parser: Callable[[str], Any] | None = None) -> Any:
    """Declares a global option."""
    return typer.Option(*names, metavar=value, help=text, show_default=False, parser=parser)


def directory(text: str) -> Path:
    """Returns the path; refuses an empty one, which comes of an unset variable and would mean the current directory."""
    if not text:
        raise typer.BadParameter("the name of the directory is empty; -w . is the current directory")
    return Path(text)


def global_options(
    context: typer.Context,
    workspace: Annotated[
        Path | None,
        option(
            "-w",
            "--workspace",
            value="DIR",
            text="The directory to work on; commits are written to it.  [default: the current directory]",
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
        bool | None,
        typer.Option(
            "--root",
            help="Run commands as root, not as DIR's owner. Root has no capabilities in a branch: in another owner's "
            "DIR it can write only where all users can.",
            show_default=False,
        ),
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
        option("--driver", value="|".join(DRIVERS), text="Filesystem driver for branches.  [default: auto]"),
    ] = None,
    policy: Annotated[
        str | None,
        option(
            "--policy",
            value="|".join(POLICIES),
            text="Conflict policy for sibling branches.  [default: first-winner]",
        ),
    ] = None,
    idle: Annotated[
        str | None, option("--idle", value="TIME", text="End a warm container after this idle time.  [default: 30m]")
    ] = None,
    engine: Annotated[
        str | None,
        option("--engine", value="|".join(ENGINES), text="Container engine.  [default: docker, else podman]"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the docker command instead of running it.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the versions of this program and of the image, and exit.")
    ] = False,
) -> None:
    """Stores the options for the command."""
    flags = {name: value for name, value in context.params.items() if name in NAMES and value not in ((), [])}
    context.obj = GlobalOptions(workspace=workspace, flags=flags, is_dry_run=dry_run)
    if version:
        show_versions(context.obj)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
