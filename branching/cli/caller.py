"""How the one who called names this command and its directory, in the texts that we write.

In a container started by `branching-docker` the directory is /src, its mount /workspace, and the
command `branching`. The caller is outside, where none of the three exists: the wrapper says in two
variables what they are called there. What the user's own programs print is never changed.
"""

from __future__ import annotations

import os
import re

COMMAND_VARIABLE = "BRANCHING_COMMAND_NAME"
DIRECTORY_VARIABLE = "BRANCHING_HOST_WORKSPACE"
INSIDE_VARIABLE = "BRANCHING_BRANCH"
"""Set for a command in a branch, which is inside as well."""

COMMANDS = (
    "run|speculate|best-of-n|reflexion|cascaded|tournament|beam-search|tree-of-thoughts|ls|diff|log"
    "|status|shell|watch|commit|abort|rebase|export|load|undo|redo|history|prune|fork|chat|mcp"
    "|skill|doctor|completion"
)
"""A test compares them with the table of commands, which takes too long to load."""
_COMMAND = re.compile(rf"(?<![\w./-])branching (?=(?:{COMMANDS})\b)")
_DIRECTORY = re.compile(r"(?<![\w./~-])/(?:workspace|src)(?![\w-]|\.\w|/@)")


def command_name() -> str:
    """Returns the beginning of the caller's command line."""
    return (_is_outside() and os.environ.get(COMMAND_VARIABLE)) or "branching"


def host_directory() -> str | None:
    """Returns the directory's path outside of the container; None if there is no outside."""
    return (_is_outside() and os.environ.get(DIRECTORY_VARIABLE)) or None


def for_caller(text: str) -> str:
    """Returns a text of ours with the caller's names for the command and the directory."""
    if (name := command_name()) != "branching":
        text = _COMMAND.sub(lambda _: f"{name} ", text)
    if directory := host_directory():
        text = _DIRECTORY.sub(lambda _: directory, text)
    return text


def _is_outside() -> bool:
    return INSIDE_VARIABLE not in os.environ
