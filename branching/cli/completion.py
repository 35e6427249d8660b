"""`branching completion`: commands and options at the tab key."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

COMPLETE_VARIABLE = "_BRANCHING_COMPLETE"
"""A shell sets it that asks how a command line could go on."""


class Shell(str, Enum):
    """The supported shells."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


_ZSH_FIRST_KEY = """
# As a file among zsh's functions all this is what runs at the first key, which is to complete too.
if [[ ${funcstack[1]} == _branching ]]; then _branching_completion "$@"; fi"""


def completion(
    shell: Annotated[Shell, typer.Argument(help="The shell to print the script for.")] = Shell.bash,
) -> None:
    """Print a script that completes commands, options and branch names in a shell.

    For zsh: branching completion zsh >"${fpath[1]}/_branching"; for fish: branching completion fish
    >~/.config/fish/completions/branching.fish

    Example: branching completion bash >>~/.bash_completion
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    script = get_completion_script(
        prog_name="branching", complete_var=COMPLETE_VARIABLE, shell=shell.value
    )
    print(script)
    if shell is Shell.zsh:
        print(_ZSH_FIRST_KEY)
