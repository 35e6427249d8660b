"""What a pattern tells while it runs: for displays, dashboards and logs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from branching.fs import DiffSummary

SETUP_INDEX = -1
"""The index by which the setup of a call, which is no candidate, is told of."""

EventKind = Literal[
    "started",
    "resumed",  # only of agents: its process had died, and its log goes on
    "output",
    "finished",
    "scored",
    "critiqued",
    "judged",
    "committed",
    "kept",
    "spent",  # only of agents
]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One step of one candidate."""

    kind: EventKind
    index: int
    """Which candidate, as in `SpeculationResult.branch_index`; `SETUP_INDEX` is the setup."""
    branch: str
    """Name of its branch."""
    label: str = ""
    """What is tried, for people: a command as it was given, or a function's name."""
    text: str = ""
    """A line of output; what the critique said; how it finished, in words."""
    state: str = ""
    """With "finished": the candidate's state."""
    score: float | None = None
    cost_usd: float | None = None
    """What its model calls have cost so far, where that is known."""
    seconds: float = 0.0
    """With "finished": how long it ran."""
    changes: DiffSummary | None = None
    """What its branch changed, where that is known: with "finished" and "committed"."""


OnEvent = Callable[[Event], None]
"""Called in order, one call at a time, but from several threads. Raising ends the pattern."""


def taking_blocks(listener: OnEvent) -> OnEvent:
    """Marks a listener as one that takes several lines of output in one event."""
    listener.takes_blocks = True  # type: ignore[attr-defined]
    return listener


def takes_blocks(listener: OnEvent) -> bool:
    """Whether the text of an "output" event may have several lines, joined by newlines."""
    return getattr(listener, "takes_blocks", False)
