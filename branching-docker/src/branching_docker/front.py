"""What stands in front of the command: the options, and what follows of them at once.

Of the settings they are a part: the rest is in variables and files.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from branching_docker.plan import checked_workspace
from branching_docker.settings import DRIVERS, ENGINES, IMAGE_DEFAULT, POLICIES, PULLS, Settings, gather

if TYPE_CHECKING:
    from collections.abc import Callable

    from branching_docker.engine import Engine


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


def connect(settings: Settings) -> Engine:
    """Returns the engine that the settings mean."""
    from branching_docker import engine

    return engine.connect(settings.engine, environ=os.environ)


def option(*names: str, value: str, text: str, parser: Callable[[str], Any] | None = None) -> Any:
    """Declares an option that stands in front of the command."""
    return typer.Option(*names, metavar=value, help=text, show_default=False, parser=parser)


def directory(text: str) -> Path:
    """Returns the path; an empty one would be where we stand, and comes of a variable that was not set."""
    if not text:
        raise typer.BadParameter("the directory's name is empty; the one you stand in is -w .")
    return Path(text)


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
    policy: Annotated[
        str | None,
        option(
            "--policy",
            value="|".join(POLICIES),
            text="What a commit means for the siblings of the branch.  [default: first-winner]",
        ),
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
        "policy": policy,
        "idle": idle,
        "engine": engine,
    }
    context.obj = Given(workspace=workspace, flags=flags, is_dry_run=dry_run)
    if version:
        from branching_docker.image import show_versions

        show_versions(context.obj)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
