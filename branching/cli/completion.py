"""`branching completion`: commands and options at the tab key."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from branching.cli import COMPLETE_VARIABLE


class Shell(str, Enum):
    """The shells that are known."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(help="The shell to write it for.")] = Shell.bash,
) -> None:
    """Print a script that completes our commands and options in a shell.

    For zsh: branching completion zsh >"${fpath[1]}/_branching"; for fish: branching completion fish
    >~/.config/fish/completions/branching.fish

    Example: branching completion bash >>~/.bash_completion
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    script = get_completion_script(
        prog_name="branching", complete_var=COMPLETE_VARIABLE, shell=shell.value
    )
    print(script)
