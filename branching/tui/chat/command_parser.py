"""Reading what was typed: a command, a word for a branch, a line for the shell, or a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["command", "steer", "shell", "prompt"]

ALLOWED_WHILE_FORKED = ("/merge", "/help", "/cost", "/tokens", "/version", "/quit", "/copy")
"""And `/fork diff`."""

HELP = """\
/fork                            fork: a row for each branch (label, instruction, model, budget)
/fork diff [PATH]                what the branches changed, side by side
/fork-branches [N]               how many rows the picker has
/fork-budget per-branch|aggregate USD, or clear
/fork-model I PROVIDER:MODEL     the model of branch I; I clear; clear
/fork-strategy [KIND]            manual, auto, auto_with_fallback, vote
/merge                           choose the winner, as the strategy says
/override LABEL                  take an automatic merge back, and merge this branch instead
>>LABEL TEXT                     send a message to one branch
!COMMAND                         run it by the shell where the open tab works
/cost /tokens /copy /help /version /quit
Tab switches tabs; Escape stops the run of a tab, after a question."""


class NotUnderstood(ValueError):
    """What was typed is no command, or a command with wrong arguments. Nothing was done."""


@dataclass(frozen=True)
class Typed:
    """What was typed, read."""

    kind: Kind
    text: str
    """The command with its slash, the branch's label or id, the shell's line, or the prompt."""
    rest: str = ""
    """A command's arguments, or what the branch is told."""


def read(text: str, branches: Sequence[tuple[str, str]]) -> Typed:
    """Reads a line. `branches` are the ids and labels of those that can be spoken to.

    NotUnderstood for an unknown branch after `>>`: what was meant for a branch goes nowhere else.
    """
    text = text.strip()
    if text.startswith(">>"):
        return _steer(text[2:].strip(), branches)
    if text.startswith("!"):
        return Typed("shell", text[1:].strip())
    if text.startswith("/"):
        word, _, rest = text.partition(" ")
        return Typed("command", word, rest.strip())
    return Typed("prompt", text)


def _steer(text: str, branches: Sequence[tuple[str, str]]) -> Typed:
    names = {name: branch_id for branch_id, label in branches for name in (label, branch_id)}
    for name in sorted(names, key=len, reverse=True):  # a label may begin with another one
        if text == name or text.startswith(f"{name} "):
            told = text[len(name) :].strip()
            if not told:
                raise NotUnderstood(f">>{name} has no text; write the message after it")
            return Typed("steer", names[name], told)
    known = ", ".join(label for _, label in branches) or "none"
    meant = text.split(" ", maxsplit=1)[0]
    raise NotUnderstood(f"no branch is called {meant!r}; there are: {known}")


def is_allowed_while_forked(typed: Typed) -> bool:
    """Whether a command may be given while a fork is open."""
    if typed.text == "/fork":
        return typed.rest == "diff" or typed.rest.startswith("diff ")
    return typed.text in ALLOWED_WHILE_FORKED
