"""`branching shell`: look around in a branch, change things, leave it as it is."""

from __future__ import annotations

import os
import secrets
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from branching.cli.caller import for_caller
from branching.cli.error_handling import handle_errors
from branching.cli.options import WorkspaceOption
from branching.cli.workspace import owned_workspace

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from branching.fs import Branch, Workspace
    from branching.patterns.attempt import Attempt

DEFAULT_SHELL = "/bin/sh"


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
        typer.Argument(metavar="[-- CMD...]", help="Run this instead.", show_default=False),
    ] = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Open a shell in a branch that was kept, or in a new one. The branch stays open after.

    The shell is $SHELL. Its exit code is the command's. What to do with the branch comes after:
    branching diff, commit, abort.

    Example: branching shell run-1a2b3c4d
    """
    with handle_errors(json=False):
        if command and command[0] == "--":  # it comes after an argument: the parser leaves it
            command = command[1:]
        from branching.cli.signals import run_interruptible
        from branching.patterns.attempt import Attempt, Task
        from branching.patterns.command_candidate import Program

        with owned_workspace(workspace) as (space, owner), _opened(space, name) as branch:
            program = Program(
                command or [os.environ.get("SHELL") or DEFAULT_SHELL],
                workspace=space.seen_at,
                owner=owner,
                tells_output=False,
                inherit_stdin=True,
            )
            task = Task(Attempt(0, branch, ""), _say_nothing, must_end=True)
            answer = run_interruptible(
                lambda: task.run(program, branch.path), is_done=lambda _: True
            )
            if getattr(answer.value, "how", None) == "error":
                print(f"error: {answer.error}", file=sys.stderr)
            _tell_what_next(branch)
        raise typer.Exit(answer.exit_code)


def _opened(space: Workspace, name: str | None) -> AbstractContextManager[Branch]:
    if name is not None:
        return nullcontext(space.reopen(name))
    return space.branch(f"shell-{secrets.token_hex(4)}", on_success=None)


def _say_nothing(_: Attempt, __: str) -> None:
    pass


def _tell_what_next(branch: Branch) -> None:
    name = branch.name
    print(f"branch: {name}\naction: kept", file=sys.stderr)
    print(
        for_caller(f"Hint: branching diff {name}; branching commit {name}; branching abort {name}"),
        file=sys.stderr,
    )
