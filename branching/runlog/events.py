"""The events of a running pattern, for displays, dashboards and logs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from branching.fs import DiffSummary

SETUP_INDEX = -1
"""The index in events about the setup of a call, which is not a candidate."""

EventKind = Literal[
    "started",
    "resumed",  # only for agents: the candidate's process had died, and its log is continued
    "placed",  # only on a cluster: a node has begun to run the candidate
    "output",
    "finished",
    "scored",
    "critiqued",
    "judged",
    "committed",
    "kept",
    "spent",  # only for agents
]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One step of one candidate."""

    kind: EventKind
    index: int
    """As `SpeculationResult.branch_index`; `SETUP_INDEX` for the setup."""
    branch: str
    """Name of the candidate's branch."""
    label: str = ""
    """Display name of the candidate: the command as given, or the name of the function."""
    text: str = ""
    """A line of output, the text of a critique, or the reason for the end."""
    state: str = ""
    """With "finished": the candidate's state."""
    score: float | None = None
    cost_usd: float | None = None
    """Cost of the candidate's model calls so far, in US dollars; None if unknown."""
    seconds: float = 0.0
    """With "finished": how long the candidate ran."""
    changes: DiffSummary | None = None
    """With "finished" and "committed": the changes of the branch; None if unknown."""
    cpu_seconds: float | None = None
    """With "finished": CPU time of the candidate's processes, in seconds; None if unknown."""
    memory_peak_bytes: int | None = None
    """With "finished": peak memory of the candidate's processes; None if unknown."""
    predecessor: int | None = None
    """Index of the candidate whose result this one started from, in a search by levels."""
    node: str = ""
    """Name of the node of the cluster that runs the candidate; empty if it is not known."""
    loser: int | None = None
    """With "judged": the index of the candidate that this one was judged better than."""


OnEvent = Callable[[Event], None]
"""A listener. It is called for each event in order, never concurrently, but from several threads.
If it raises, the pattern ends."""


def taking_blocks(listener: OnEvent) -> OnEvent:
    """Marks a listener that accepts several lines of output in one event.

    Args:
        listener: The listener.

    Returns:
        The same listener.
    """
    listener.takes_blocks = True  # type: ignore[attr-defined]
    return listener


def takes_blocks(listener: OnEvent) -> bool:
    """Returns whether the listener accepts "output" events of several lines, joined by newlines."""
    return getattr(listener, "takes_blocks", False)
