"""Who is talked with, what is heard of them, and what is asked of the front end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from branching.agent.protocols import Answer

Who = Literal["you", "agent", "note", "error", "shell", "tool"]


@dataclass(frozen=True)
class Line:
    """One entry of a transcript; its text may have several lines."""

    who: Who
    text: str


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a run of the parent came to."""

    history: Any
    """The whole conversation."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the front end is to do now."""

    kind: Literal["fork", "pick", "accept", "diff", "copy", "quit"]
    text: str = ""
    """For "diff" the path, for "pick" why the picker is shown, for "copy" what to copy."""
    branch_id: str = ""
    """For "pick" and "accept" the branch that is proposed."""


Hear = Callable[[str], None]
"""Is told what the agent says, piece by piece, as it comes."""
Ask = Callable[[str, str], Awaitable[Answer]]
"""Asks the person whether a tool may be called: its name, its arguments."""


class ChatAgent(Protocol):
    """The agent that is talked with, before a fork and after it."""

    name: str
    """Whom people see: the model's name."""

    async def say(self, prompt: str, history: Any, hear: Hear, ask: Ask) -> Reply:
        """Goes on from `history` with the prompt. Raises what a failed run raises; cancelled, it
        ends all that it has started."""
