"""The table of commands. Each lives in a file of its own and loads the library when it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from branching import __version__
from branching.cli.abort import abort
from branching.cli.attempt import attempt
from branching.cli.beam_search import beam_search
from branching.cli.best_of_n import best_of_n
from branching.cli.cascaded import cascaded
from branching.cli.chat import chat
from branching.cli.commit import commit
from branching.cli.completion import completion
from branching.cli.create import close, create
from branching.cli.diff import diff
from branching.cli.doctor import doctor
from branching.cli.error_handling import handle_errors
from branching.cli.export import export
from branching.cli.fork import fork
from branching.cli.history import history
from branching.cli.hook import hook
from branching.cli.kernel import kernel
from branching.cli.load import load
from branching.cli.log import log
from branching.cli.ls import ls
from branching.cli.mcp import mcp
from branching.cli.options import Driver, Policy
from branching.cli.prune import prune
from branching.cli.rebase import rebase
from branching.cli.reflexion import reflexion
from branching.cli.run import run
from branching.cli.session import session
from branching.cli.settings_file import apply_settings
from branching.cli.shell import shell
from branching.cli.show import show
from branching.cli.skill import skill
from branching.cli.speculate import speculate
from branching.cli.status import status
from branching.cli.tournament import tournament
from branching.cli.tree_of_thoughts import tree_of_thoughts
from branching.cli.undo import redo, restore, save, undo
from branching.cli.watch import watch
from branching.cli.workspace import mount_options


class _GroupedCommands(TyperGroup):
    """Lists the commands in groups, in the order in which a user meets them."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002  (click's signature)
        """Writes the groups, with one width for the names of all commands."""
        width = max(map(len, _COMMANDS))
        for title, commands in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name.ljust(width), text) for name, (_, text) in commands.items()]
                )


app = typer.Typer(
    cls=_GroupedCommands,
    help="Try things in copy-on-write branches of a directory; keep what works.",
    add_completion=False,  # `completion` is a command
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text: the same in a terminal, a pipe and the manual
    context_settings={"help_option_names": ["-h", "--help"]},
)

_GROUPS: dict[str, dict[str, tuple[Callable[..., None], str]]] = {
    "Try": {
        "run": (run, "Run a command in a branch; commit it if the command succeeds."),
        "speculate": (speculate, "Race several commands; commit the first that succeeds."),
        "best-of-n": (best_of_n, "Run a command N times; commit the best success."),
        "reflexion": (reflexion, "Retry a command with the critique of the failed attempt."),
        "cascaded": (cascaded, "Run waves of attempts, each wider than the last."),
        "tournament": (tournament, "Run N attempts; a judge compares them in pairs."),
        "beam-search": (beam_search, "Keep the best few candidates of each level and expand them."),
        "tree-of-thoughts": (tree_of_thoughts, "Refine the best candidate of each level."),
        "attempt": (attempt, "Run a command in a branch of a base; write its layer to a file."),
    },
    "Review": {
        "ls": (ls, "List the open branches."),
        "diff": (diff, "Show the changes of a branch."),
        "log": (log, "Show the output of earlier commands and candidates."),
        "status": (status, "Show the workspace and its open branches."),
        "shell": (shell, "Open a shell in a branch."),
        "session": (session, "Open a Python prompt that forks with its memory and files."),
        "kernel": (kernel, "Register a Jupyter kernel that forks with its memory and files."),
        "watch": (watch, "Show all branches and runs in a terminal UI."),
    },
    "Keep or drop": {
        "commit": (commit, "Commit an open branch."),
        "abort": (abort, "Drop an open branch."),
        "rebase": (rebase, "Replay a stale branch on the present state."),
        "export": (export, "Write a branch to an archive."),
        "load": (load, "Make a branch from an archive."),
        "create": (create, "Create a branch for programs that use it by path."),
        "close": (close, "Unmount what create has mounted; keep the branches."),
    },
    "Undo": {
        "undo": (undo, "Undo the last commit."),
        "redo": (redo, "Redo the last undone commit."),
        "history": (history, "List the commits that can be undone."),
        "show": (show, "Show what a commit changed."),
        "save": (save, "Save the place in the history as a checkpoint."),
        "restore": (restore, "Return to a checkpoint."),
        "prune": (prune, "Delete undo history and logs to free space."),
    },
    "Agents": {
        "fork": (fork, "Run agents in parallel branches; merge one."),
        "chat": (chat, "Talk with an agent; fork the conversation and its files."),
        "mcp": (mcp, "Serve branches as tools of an agent (MCP)."),
        "hook": (hook, "Give an agent branches instead of git worktrees."),
        "skill": (skill, "Install the skill that tells an agent how to use branching."),
    },
    "Set up": {
        "doctor": (doctor, "Check this machine."),
        "completion": (completion, "Print a shell completion script."),
    },
}
"""The groups of the help, and the function and summary of each command."""
_COMMANDS = {name: command for group in _GROUPS.values() for name, command in group.items()}
_TITLES = {name: title for title, group in _GROUPS.items() for name in group}
_WRAP_A_COMMAND = (
    *("run", "best-of-n", "reflexion", "cascaded", "tournament", "attempt", "shell", "fork"),
)


def _help(function: Callable[..., None]) -> str:
    """Returns the docstring; its example is not broken into lines, so that it can be copied."""
    return cleandoc(function.__doc__ or "").replace("\nExample: ", "\n\b\nExample: ")


for _name, (_function, _summary) in _COMMANDS.items():
    app.command(
        _name,
        help=_help(_function),
        short_help=_summary,
        rich_help_panel=_TITLES[_name],
        # Options of ours end at the first word of the command that is run: its own are its own.
        context_settings={"allow_interspersed_args": _name not in _WRAP_A_COMMAND},
    )(_function)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"branching {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
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
