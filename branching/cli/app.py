"""The table of commands. Each lives in a file of its own and loads the library when it runs.

A command line that begins with the name of a command loads the file of that command only, and the
list of commands loads none (`app_for`). Completion and settings need all of them: `app`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from inspect import cleandoc
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from branching import __version__
from branching.cli.error_handling import handle_errors
from branching.cli.options import Driver, Policy
from branching.cli.settings_file import apply_settings, has_settings
from branching.cli.workspace import mount_options

if TYPE_CHECKING:
    app: typer.Typer
    """The application with all commands."""


class _GroupedCommands(TyperGroup):
    """Lists the commands in groups, in the order in which a user meets them."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002  (click's signature)
        """Writes the groups, with one width for the names of all commands."""
        width = max(map(len, _COMMANDS))
        for title, commands in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, text in commands.items()])


_GROUPS: dict[str, dict[str, str]] = {
    "Try": {
        "run": "Run a command in a branch; commit it if the command succeeds.",
        "speculate": "Race several commands; commit the first that succeeds.",
        "best-of-n": "Run a command N times; commit the best success.",
        "reflexion": "Retry a command with the critique of the failed attempt.",
        "cascaded": "Run waves of attempts, each wider than the last.",
        "tournament": "Run N attempts; a judge compares them in pairs.",
        "beam-search": "Keep the best few candidates of each level and expand them.",
        "tree-of-thoughts": "Refine the best candidate of each level.",
        "attempt": "Run a command in a branch of a base; write its layer to a file.",
    },
    "Review": {
        "ls": "List the open branches.",
        "diff": "Show the changes of a branch.",
        "log": "Show the output of earlier commands and candidates.",
        "status": "Show the workspace and its open branches.",
        "shell": "Open a shell in a branch.",
        "session": "Open a Python prompt that forks with its memory and files.",
        "kernel": "Register a Jupyter kernel that forks with its memory and files.",
        "watch": "Show all branches and runs in a terminal UI.",
    },
    "Keep or drop": {
        "commit": "Commit an open branch.",
        "abort": "Drop an open branch.",
        "rebase": "Replay a stale branch on the present state.",
        "export": "Write a branch to an archive.",
        "load": "Make a branch from an archive.",
        "create": "Create a branch for programs that use it by path.",
        "close": "Unmount what create has mounted; keep the branches.",
    },
    "Undo": {
        "undo": "Undo the last commit.",
        "redo": "Redo the last undone commit.",
        "history": "List the commits that can be undone.",
        "show": "Show what a commit changed.",
        "save": "Save the place in the history as a checkpoint.",
        "restore": "Return to a checkpoint.",
        "prune": "Delete undo history and logs to free space.",
    },
    "Agents": {
        "fork": "Run agents in parallel branches; merge one.",
        "chat": "Talk with an agent; fork the conversation and its files.",
        "mcp": "Serve branches as tools of an agent (MCP).",
        "hook": "Give an agent branches instead of git worktrees.",
        "skill": "Install the skill that tells an agent how to use branching.",
    },
    "Set up": {
        "doctor": "Check this machine.",
        "completion": "Print a shell completion script.",
    },
}
"""The groups of the help, and the summary of each command."""
_OTHER_FILES = {"close": "create", "redo": "undo", "save": "undo", "restore": "undo"}
"""Files of commands that are not named after them."""
_COMMANDS = {name: command for group in _GROUPS.values() for name, command in group.items()}
_TITLES = {name: title for title, group in _GROUPS.items() for name in group}
_WRAP_A_COMMAND = (
    *("run", "best-of-n", "reflexion", "cascaded", "tournament", "attempt", "shell", "fork"),
)


def _help(function: Callable[..., None]) -> str:
    """Returns the docstring; its example is not broken into lines, so that it can be copied."""
    return cleandoc(function.__doc__ or "").replace("\nExample: ", "\n\b\nExample: ")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"branching {__version__}")
        raise typer.Exit


def branching(
    context: typer.Context,
    driver: Annotated[
        Driver | None,
        typer.Option(
            help="Filesystem driver for branches, if the command mounts the directory: fuse serves "
            "every policy, overlay is faster and serves first-winner. [default: $BRANCHFS_DRIVER, "
            "or auto]",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        Policy | None,
        typer.Option(
            help="Conflict policy for sibling branches, if the command mounts the directory: "
            "after a commit, first-winner makes them stale; snapshot keeps those that wrote "
            "other paths; serializable also checks what they read. [default: "
            "$BRANCHFS_POLICY, or first-winner]",
            show_default=False,
        ),
    ] = None,
    version: Annotated[  # noqa: ARG001  (its callback does the work)
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Shows the help when no command is named."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        return
    with handle_errors(json="--json" in sys.argv):
        apply_settings(context)
    mount_options["driver"] = driver.value if driver else context.params["driver"]
    mount_options["policy"] = policy.value if policy else context.params["policy"]


def app_for(words: list[str]) -> typer.Typer:
    """Returns an application that can run a command line.

    Args:
        words: The command line.
    """
    if words in ([], ["-h"], ["--help"], ["--version"]):
        return _application([])
    if words[0] in _COMMANDS and not has_settings():
        return _application([words[0]])
    return _application(_COMMANDS)


def _application(names: Iterable[str]) -> typer.Typer:
    """Returns an application with some of the commands."""
    made = typer.Typer(
        cls=_GroupedCommands,
        help="Try things in copy-on-write branches of a directory; keep what works.",
        add_completion=False,  # `completion` is a command
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # plain text: the same in a terminal, a pipe and the manual
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback(invoke_without_command=True)(branching)
    for name in names:
        module = import_module(f"branching.cli.{_OTHER_FILES.get(name, name.replace('-', '_'))}")
        function: Callable[..., None] = getattr(module, name.replace("-", "_"))
        made.command(
            name,
            help=_help(function),
            short_help=_COMMANDS[name],
            rich_help_panel=_TITLES[name],
            # Options of ours end at the first word of the command that is run: its own are its own.
            context_settings={"allow_interspersed_args": name not in _WRAP_A_COMMAND},
        )(function)
    return made


def __getattr__(name: str) -> typer.Typer:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()["app"] = _application(_COMMANDS)
    return globals()["app"]  # type: ignore[no-any-return]
