"""Translates names of commands and paths in our messages to those of the host.

In a container of `branching-docker`, the directory is /src, its mount /workspace, and the command
`branching`. None of them exists on the host. The wrapper passes the names on the host in two
environment variables. The output of the user's programs is never changed.
"""

from __future__ import annotations

import os
import re

COMMAND_VARIABLE = "BRANCHING_COMMAND_NAME"
DIRECTORY_VARIABLE = "BRANCHING_HOST_WORKSPACE"
START_VARIABLE = "BRANCHING_START_DIRECTORY"
"""Where in the directory the caller is on the host, relative to it; set by the wrapper."""
INSIDE_VARIABLE = "BRANCHING_BRANCH"
"""Set for a command in a branch, which is inside as well."""

COMMANDS = (
    "run|speculate|best-of-n|reflexion|cascaded|tournament|beam-search|tree-of-thoughts|attempt|ls"
    "|diff|log|status|shell|session|kernel|watch|commit|abort|rebase|export|load|create|close|undo|redo|history"
    "|show|save|restore|prune|fork|chat|mcp|hook|skill|doctor|completion"
)
"""A test compares them with the table of commands, which takes too long to load."""
_COMMAND = rf"(?<![\w./-])branching (?=(?:{COMMANDS})\b)"
_DIRECTORY = r"(?<![\w./~-])/(?:workspace|src)(?![\w-]|\.\w|/@)"


def command_name() -> str:
    """Returns the beginning of the caller's command line."""
    return (_is_outside() and os.environ.get(COMMAND_VARIABLE)) or "branching"


def host_directory() -> str | None:
    """Returns the directory's path on the host; None outside of a container."""
    return (_is_outside() and os.environ.get(DIRECTORY_VARIABLE)) or None


def for_caller(text: str) -> str:
    """Returns a message with the host's names for the command and the directory."""
    if (name := command_name()) != "branching":
        text = re.sub(_COMMAND, lambda _: f"{name} ", text)
    if directory := host_directory():
        text = re.sub(_DIRECTORY, lambda _: directory, text)
    return text


def _is_outside() -> bool:
    return INSIDE_VARIABLE not in os.environ
