"""The table of commands. Each lives in a file of its own and loads the library when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from branching import __version__
from branching.cli.abort import abort
from branching.cli.beam_search import beam_search
from branching.cli.best_of_n import best_of_n
from branching.cli.cascaded import cascaded
from branching.cli.commit import commit
from branching.cli.diff import diff
from branching.cli.doctor import doctor
from branching.cli.history import history
from branching.cli.log import log
from branching.cli.ls import ls
from branching.cli.prune import prune
from branching.cli.redo import redo
from branching.cli.reflexion import reflexion
from branching.cli.run import run
from branching.cli.shell import shell
from branching.cli.speculate import speculate
from branching.cli.status import status
from branching.cli.tournament import tournament
from branching.cli.tree_of_thoughts import tree_of_thoughts
from branching.cli.undo import undo

# Options of ours end at the first word of the command that is run: its own options are its own.
_WRAPS_A_COMMAND = {"allow_interspersed_args": False}

app = typer.Typer(
    help="Try things in copy-on-write branches of a directory; keep what works.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text: the same in a terminal, a pipe and the manual
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("run", context_settings=_WRAPS_A_COMMAND)(run)
app.command("speculate")(speculate)
app.command("best-of-n", context_settings=_WRAPS_A_COMMAND)(best_of_n)
app.command("reflexion", context_settings=_WRAPS_A_COMMAND)(reflexion)
app.command("cascaded", context_settings=_WRAPS_A_COMMAND)(cascaded)
app.command("tournament", context_settings=_WRAPS_A_COMMAND)(tournament)
app.command("beam-search")(beam_search)
app.command("tree-of-thoughts")(tree_of_thoughts)
app.command("status")(status)
app.command("shell", context_settings=_WRAPS_A_COMMAND)(shell)
app.command("log")(log)
app.command("ls")(ls)
app.command("diff")(diff)
app.command("commit")(commit)
app.command("abort")(abort)
app.command("undo")(undo)
app.command("redo")(redo)
app.command("history")(history)
app.command("prune")(prune)
app.command("doctor")(doctor)


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
