"""The table of commands. Each lives in a file of its own and loads the library when it runs."""

from __future__ import annotations

from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated

import typer

from branching import __version__
from branching.cli.abort import abort
from branching.cli.beam_search import beam_search
from branching.cli.best_of_n import best_of_n
from branching.cli.cascaded import cascaded
from branching.cli.chat import chat
from branching.cli.commit import commit
from branching.cli.completion import completion
from branching.cli.diff import diff
from branching.cli.doctor import doctor
from branching.cli.export import export
from branching.cli.fork import fork
from branching.cli.history import history
from branching.cli.load import load
from branching.cli.log import log
from branching.cli.ls import ls
from branching.cli.mcp import mcp
from branching.cli.prune import prune
from branching.cli.rebase import rebase
from branching.cli.reflexion import reflexion
from branching.cli.reversal import redo, undo
from branching.cli.run import run
from branching.cli.shell import shell
from branching.cli.speculate import speculate
from branching.cli.status import status
from branching.cli.tournament import tournament
from branching.cli.tree_of_thoughts import tree_of_thoughts
from branching.cli.watch import watch

app = typer.Typer(
    help="Try things in copy-on-write branches of a directory; keep what works.",
    add_completion=False,  # `completion` is a command
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text: the same in a terminal, a pipe and the manual
    context_settings={"help_option_names": ["-h", "--help"]},
)

_COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "run": (run, "One command in one branch."),
    "speculate": (speculate, "A race: the first success is committed."),
    "best-of-n": (best_of_n, "One command N times: the best success."),
    "reflexion": (reflexion, "Again and again, learning from failure."),
    "cascaded": (cascaded, "Waves of attempts that widen."),
    "tournament": (tournament, "Pairs before a judge, until one is left."),
    "beam-search": (beam_search, "The best few of each level go on."),
    "tree-of-thoughts": (tree_of_thoughts, "The best of each level is refined."),
    "fork": (fork, "Agents side by side: one is merged."),
    "status": (status, "The workspace and its open branches."),
    "chat": (chat, "Talk with an agent, and fork the talk."),
    "watch": (watch, "All that is tried, on one screen."),
    "ls": (ls, "The open branches."),
    "diff": (diff, "What a branch changed."),
    "log": (log, "What candidates printed."),
    "shell": (shell, "Look around in a branch."),
    "export": (export, "A branch as an archive."),
    "load": (load, "A branch from an archive."),
    "commit": (commit, "Take over a branch that was kept."),
    "rebase": (rebase, "A stale branch, forked anew with its changes."),
    "abort": (abort, "Drop a branch that was kept."),
    "undo": (undo, "Take the last commit back."),
    "redo": (redo, "Make it again."),
    "history": (history, "The commits that can be undone."),
    "prune": (prune, "Forget them, and give back their room."),
    "mcp": (mcp, "Branches as tools of an agent."),
    "doctor": (doctor, "What works on this machine."),
    "completion": (completion, "Our commands at the tab key."),
}
_WRAP_A_COMMAND = ("run", "best-of-n", "reflexion", "cascaded", "tournament", "shell", "fork")


def _help(function: Callable[..., None]) -> str:
    """Returns the docstring; its example is not broken into lines, so that it can be copied."""
    return cleandoc(function.__doc__ or "").replace("\nExample: ", "\n\b\nExample: ")


for _name, (_function, _summary) in _COMMANDS.items():
    app.command(
        _name,
        help=_help(_function),
        short_help=_summary,
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
