"""The command group: which words are commands.

The arguments after the name of one of `branching`'s commands are passed through unchanged, options and every `--`
included. Two things are done on the host: the help is shown, which needs no image, and a file of the host that the
arguments name is opened (`host_files`). An unknown name is passed through too, since the image may be newer.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand, TyperGroup

from branching_docker.constants import OWN_COMMANDS
from branching_docker.inner import HELP_OPTIONS, commands, parse_words

GROUPS = {name: about["group"] for name, about in commands().items()}
FORWARDED_COMMANDS = {name: about["summary"] for name, about in commands().items() if name not in OWN_COMMANDS}
FORWARDED_COMMANDS["ls"] = FORWARDED_COMMANDS["ls"].removesuffix(".") + "; without -w, also the running containers."
COLUMN_GAP = 6
"""Columns of a line of the help that are neither name nor text."""
COMMAND_NAME = re.compile(r"[a-z][a-z0-9-]*")


@dataclass(frozen=True)
class Completion:
    """One completion, in the form that the shells' scripts expect."""

    value: str
    help: str
    type: str = "plain"


class PassthroughCommand(TyperCommand):
    """A command whose arguments are passed through: an inserted `--` stops the parser."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses nothing."""
        return super().parse_args(ctx, ["--", *args])

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Returns the command's options, up to the words of a user's own command."""
        about = commands().get(str(self.name))
        given = list(ctx.params.get("arguments") or ())
        if about is None or "--" in given or is_in_command(str(self.name), given):
            return []
        options = [(name, option["help"]) for option in about["options"] for name in option["names"]]
        options += [(name, "Show this message and exit.") for name in HELP_OPTIONS]
        return [Completion(name, text) for name, text in options if name.startswith(incomplete)]


def is_in_command(name: str, given: list[str]) -> bool:
    """Returns whether the arguments have reached the user's own command."""
    options = sum(word.place.stop - word.place.start for word in parse_words(name, given))
    return bool(commands()[name]["wraps"]) and options < len(given)


class CommandGroup(TyperGroup):
    """The wrapper's own commands, the known ones of `branching`, and any other word, which the image may know."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the commands in groups, in their order, with one width for the names of all commands."""
        groups: dict[str, list[tuple[str, str]]] = {}
        width = max(map(len, self.commands))
        limit = formatter.width - width - COLUMN_GAP
        for name in self.list_commands(ctx):
            command: Any = self.commands[name]
            text = command.get_short_help_str(limit)
            groups.setdefault(command.rich_help_panel, []).append((name.ljust(width), text))
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns the command of that name."""
        known = super().get_command(ctx, cmd_name)
        if known is not None or not COMMAND_NAME.fullmatch(cmd_name):
            return known
        unknown = copy.copy(super().get_command(ctx, "run"))
        if unknown is not None:
            unknown.name = cmd_name
        return unknown
