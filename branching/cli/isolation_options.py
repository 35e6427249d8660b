"""The options that decide what commands in branches can see and reach: files, network, variables,
caches and the directory in which they start."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from branching.cli.cache_option import CacheOption, checked_caches
from branching.cli.error_handling import UsageFault, note
from branching.cli.options import not_blank
from branching.cli.workspace import start_directory

if TYPE_CHECKING:
    from branching.fs import Workspace

NoNetworkOption = Annotated[
    bool,
    typer.Option("--no-network", help="Give commands no network except the loopback interface."),
]

CleanEnvOption = Annotated[
    bool,
    typer.Option(
        "--clean-env",
        help=(
            "Pass only PATH, HOME, the locale and similar variables to commands, no keys or tokens."
        ),
    ),
]

EnvOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        callback=not_blank,
        help="With --clean-env: pass this variable on, too. Repeatable.",
        show_default=False,
    ),
]


HideOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOB",
        callback=not_blank,
        help="Files that commands can neither read nor write: '**/.env'. Repeatable.",
        show_default=False,
    ),
]


@dataclass(frozen=True, kw_only=True)
class IsolationOptions:
    """What the commands of a call can see and reach."""

    hide: HideOption = None
    no_network: NoNetworkOption = False
    clean_env: CleanEnvOption = False
    env: EnvOption = None
    cache: CacheOption = None

    def isolation(self) -> dict[str, Any]:
        """Returns the arguments of a `BranchCommand`.

        Raises:
            UsageFault: A glob is none, or `env` is given without `clean_env`.
        """
        return {
            "hide": checked_globs(self.hide),
            "network": not self.no_network,
            "clean_env": self.clean_env,
            "env": passed_on(self.env, clean_env=self.clean_env),
        }

    def place(self, workspace: Workspace) -> dict[str, Any]:
        """Returns the arguments of a `BranchCommand` that depend on the open workspace.

        Raises:
            UsageFault: A cache must not be writable from a branch.
        """
        return {
            "caches": checked_caches(self.cache or (), workspace),
            "directory": start_directory(workspace),
        }


def checked_globs(globs: list[str] | None) -> tuple[str, ...]:
    """Returns the globs of files to hide. UsageFault where one is none."""
    from branching.process import Sandbox

    hide = tuple(globs or ())
    try:
        Sandbox.of("/", hide=hide)
    except ValueError as error:
        raise UsageFault(str(error)) from error
    return hide


def passed_on(names: list[str] | None, *, clean_env: bool) -> dict[str, str]:
    """Returns the variables of --env that exist, and notes the others.

    Raises:
        UsageFault: There are names without --clean-env.
    """
    if names and not clean_env:
        raise UsageFault("--env passes a variable on with --clean-env; give --clean-env, too")
    return {name: os.environ[name] for name in checked_variables(names)}


def checked_variables(names: list[str] | None) -> list[str]:
    """Returns the names of those variables that there are, and tells of the others."""
    for name in names or ():
        if name not in os.environ:
            note(f"--env {name}: there is no such variable in the environment")
    return [name for name in names or () if name in os.environ]
