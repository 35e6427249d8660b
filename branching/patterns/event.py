"""What a pattern tells while it runs: for displays, dashboards and logs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

EventKind = Literal[
    "started", "output", "finished", "scored", "critiqued", "judged", "committed", "kept"
]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One step of one candidate."""

    kind: EventKind
    index: int
    """Which candidate, as in `SpeculationResult.branch_index`."""
    branch: str
    """Name of its branch."""
    text: str = ""
    """A line of output; what the critique said; how it finished, in words."""
    state: str = ""
    """With "finished": the candidate's state."""
    score: float | None = None
    seconds: float = 0.0
    """With "finished": how long it ran."""


OnEvent = Callable[[Event], None]
"""Called in order, one call at a time, but from several threads. Raising ends the pattern."""
