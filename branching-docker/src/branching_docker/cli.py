"""The command line: which words mean what. One function a command; decisions are in `plan`, deeds in `engine`.

What follows the name of one of `branching`'s own commands is that command's affair and reaches it untouched, whatever
it looks like: options, `-h`, and every `--`.
"""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from branching_docker import __version__, engine
from branching_docker.errors import WrapperError
from branching_docker.plan import IMAGE_DEFAULT, IMAGE_VARIABLE, plan_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

app = typer.Typer(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Runs `branching` on a directory, in a container: what wins is written back, the rest leaves no trace.",
    epilog="Example: branching-docker -w . speculate -c './fix-a && make test' -c './fix-b && make test'",
)

PASSED_ON = {
    "run": "Run a command in a branch; commit when it succeeds.",
    "speculate": "Race several commands; commit the first that succeeds.",
    "best-of-n": "Run a command N times; commit the best score.",
    "reflexion": "Try again with the critique of the failed attempt.",
    "status": "Show the workspace and its branches.",
}


class Untouched(TyperCommand):
    """A command whose arguments are not ours: a `--` of our own in front stops the parser at once."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses nothing."""
        return super().parse_args(ctx, ["--", *args])


@contextmanager
def reported() -> Iterator[None]:
    """Turns a failure of ours into its lines on standard error and its exit code."""
    try:
        yield
    except WrapperError as error:
        for line in error.lines():
            typer.echo(line, err=True)
        raise typer.Exit(error.exit_code) from error


@app.callback()
def settings(
    context: typer.Context,
    workspace: Annotated[
        Path | None,
        typer.Option(
            "-w",
            "--workspace",
            metavar="DIR",
            help="The directory to work on; commits are written to it.",
        ),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"The image to run.  [env: {IMAGE_VARIABLE}; default: {IMAGE_DEFAULT}]",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the docker command instead of running it.")] = False,
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    """Keeps the options that stand in front of the command."""
    if version:
        typer.echo(f"branching-docker {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
    context.obj = {"workspace": workspace, "image": image, "dry_run": dry_run}


def pass_on(command: str) -> Callable[[typer.Context, list[str] | None], None]:
    """Returns the function behind one of `branching`'s own commands."""

    def run(
        context: typer.Context,
        arguments: Annotated[list[str] | None, typer.Argument(metavar="...")] = None,
    ) -> None:
        workspace, image, dry_run = (context.obj[key] for key in ("workspace", "image", "dry_run"))
        if workspace is None:
            message = f"which directory? Put -w DIR in front of the command: branching-docker -w . {command} ..."
            raise typer.BadParameter(message, param_hint="-w")
        with reported():
            plan = plan_run(
                [command, *(arguments or [])],
                workspace=workspace,
                image=image,
                name=f"branching-{secrets.token_hex(4)}",
                environ=os.environ,
                tty=sys.stdin.isatty() and sys.stdout.isatty(),
            )
            if dry_run:
                typer.echo(shlex.join(plan.argv()))
                return
            sys.stdout.flush()
            engine.run(plan, environ=os.environ)

    return run


for name, summary in PASSED_ON.items():
    note = f"Everything after the name goes to it: branching-docker -w . {name} --help"
    app.command(name, cls=Untouched, add_help_option=False, short_help=summary, help=f"{summary} {note}")(pass_on(name))


@app.command()
def build(
    context: typer.Context,
    source: Annotated[Path, typer.Argument(metavar="[SOURCE]", help="BranchContext's source tree.")] = Path(),
) -> None:
    """Build the image from the source tree."""
    with reported():
        image = context.obj["image"] or os.environ.get(IMAGE_VARIABLE) or IMAGE_DEFAULT
        engine.build(source.absolute(), image, environ=os.environ)
