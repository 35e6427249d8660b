"""Which words are commands.

What follows the name of one of `branching`'s own commands is that command's affair and reaches it untouched, whatever
it looks like: options, `-h`, and every `--`. A name we do not know is the image's affair too: it may have newer ones.
"""

from __future__ import annotations

import copy
import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

PASSED_ON = {
    "run": "Run a command in a branch; commit when it succeeds.",
    "speculate": "Race several commands; commit the first that succeeds.",
    "best-of-n": "Run a command N times; commit the best score.",
    "reflexion": "Try again with the critique of the failed attempt.",
    "status": "Show the workspace and its branches.",
    "ls": "List the branches that are kept; without -w, the containers at work.",
    "diff": "Show what a kept branch changes.",
    "commit": "Commit a kept branch.",
    "abort": "Drop a kept branch.",
    "shell": "Enter a branch with a shell.",
    "mcp": "Serve branches as tools of an agent.",
}
COMMAND_NAME = re.compile(r"[a-z][a-z0-9-]*")


class Untouched(TyperCommand):
    """A command whose arguments are not ours: a `--` of our own in front stops the parser at once."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses nothing."""
        return super().parse_args(ctx, ["--", *args])


class Words(TyperGroup):
    """The commands: ours, those of the image that we know, and any other word, which the image will judge."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns the command of that name."""
        known = super().get_command(ctx, cmd_name)
        if known is not None or not COMMAND_NAME.fullmatch(cmd_name):
            return known
        unknown = copy.copy(super().get_command(ctx, "run"))
        if unknown is not None:
            unknown.name = cmd_name
        return unknown
