"""`branching shell`: an interactive shell in a branch. The branch stays open when it ends."""

from __future__ import annotations

import os
import secrets
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from branching.cli.error_handling import handle_errors, note
from branching.cli.isolation_options import IsolationOptions
from branching.cli.option_groups import expand_option_groups
from branching.cli.options import WorkspaceOption
from branching.cli.output import note_result
from branching.cli.workspace import owned_workspace

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from branching.fs import Branch, Workspace
    from branching.patterns.attempt import Attempt

DEFAULT_SHELL = "/bin/sh"


@expand_option_groups
def shell(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[BRANCH]",
            help="Name of an open branch. [default: a new one]",
            show_default=False,
        ),
    ] = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- CMD...]", help="Command to run instead of a shell.", show_default=False
        ),
    ] = None,
    workspace: WorkspaceOption = None,
    *,
    isolation: IsolationOptions,
) -> None:
    """Open a shell in an open branch, or in a new one. The branch stays open afterwards.

    The shell is $SHELL, and the exit code is the shell's. Afterwards use branching diff, commit
    or abort.

    Example: branching shell run-1a2b3c4d
    """
    with handle_errors(json=False):
        # The parser drops `--` in front of the arguments, and leaves it after one of them.
        if command and command[0] == "--":
            command = command[1:]
        elif name is not None and _is_first_after_dashes(sys.argv, name, command or []):
            command = [name, *(command or [])]
            name = None
        from branching.cli.signals import run_interruptible
        from branching.patterns.attempt import Attempt, Task
        from branching.patterns.command_candidate import Program

        how = isolation.isolation()
        with owned_workspace(workspace) as (space, owner), _opened(space, name) as branch:
            program = Program(
                command or [os.environ.get("SHELL") or DEFAULT_SHELL],
                workspace=space.seen_at,
                owner=owner,
                tells_output=False,
                inherit_stdin=True,
                **how,
                **isolation.place(space),
            )
            task = Task(Attempt(0, branch, ""), _say_nothing, must_end=True)
            answer = run_interruptible(
                lambda: task.run(program, branch.path), is_done=lambda _: True
            )
            if getattr(answer.value, "how", None) == "error":
                print(f"error: {answer.error}", file=sys.stderr)
            _tell_what_next(branch)
        raise typer.Exit(answer.exit_code)


def _is_first_after_dashes(words: list[str], name: str, command: list[str]) -> bool:
    """Returns whether `--` stands directly before `name`, which the rest of the words follow."""
    rest = ["--", name, *command]
    return words[-len(rest) :] == rest


def _opened(space: Workspace, name: str | None) -> AbstractContextManager[Branch]:
    if name is not None:
        return nullcontext(space.reopen(name))
    return space.branch(f"shell-{secrets.token_hex(4)}", on_success=None)


def _say_nothing(_: Attempt, __: str) -> None:
    pass


def _tell_what_next(branch: Branch) -> None:
    name = branch.name
    note_result(f"kept branch {name}")
    note(f"Hint: branching diff {name}; branching commit {name}; branching abort {name}")
