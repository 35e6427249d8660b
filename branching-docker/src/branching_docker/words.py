"""Which words are commands.

What follows the name of one of `branching`'s own commands is that command's affair and reaches it untouched, whatever
it looks like: options and every `--`. Two things are done here: its help is shown, which needs no image, and a file of
the host that it names is opened (`host_files`). A name we do not know is the image's affair too, which may be newer.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand, TyperGroup

from branching_docker.inner import HELP_OPTIONS, commands, parsed
from branching_docker.names import OURS

PASSED_ON = {name: about["summary"] for name, about in commands().items() if name not in OURS}
PASSED_ON["ls"] = PASSED_ON["ls"].removesuffix(".") + "; without -w, the running containers."
COMMAND_NAME = re.compile(r"[a-z][a-z0-9-]*")


@dataclass(frozen=True)
class Completion:
    """One word that could come next, as the shells' scripts are told it."""

    value: str
    help: str
    type: str = "plain"


class Untouched(TyperCommand):
    """A command whose arguments are not ours: a `--` of our own in front stops the parser."""

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
    """Returns whether the words of a user's own command have begun."""
    options = sum(word.place.stop - word.place.start for word in parsed(name, given))
    return bool(commands()[name]["wraps"]) and options < len(given)


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
