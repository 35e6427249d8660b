"""Who is talked with, and what is heard of them."""

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


Hear = Callable[[str], None]
"""Is told what the agent says, piece by piece, as it comes."""
Ask = Callable[[str, str], Awaitable[Answer]]
"""Asks the person whether a tool may be called: its name, its arguments."""


class Voice(Protocol):
    """The agent that is talked with, before a fork and after it."""

    name: str
    """Whom people see: the model's name."""

    async def say(self, prompt: str, history: Any, hear: Hear, ask: Ask) -> Reply:
        """Goes on from `history` with the prompt. Raises what a failed run raises; cancelled, it
        ends all that it has started."""
