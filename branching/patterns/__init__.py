"""The patterns: ways to try candidates in branches and to choose one.

Configure a pattern, call it with a Workspace (or a Branch, to work inside that), get a
SpeculationOutcome. One runner serves them all (`runner.py`).
"""

from __future__ import annotations

from branching.patterns.beam_search import BeamSearch
from branching.patterns.best_of_n import BestOfN
from branching.patterns.cascaded import Cascaded
from branching.patterns.event import Event
from branching.patterns.outcome import SpeculationOutcome, SpeculationResult
from branching.patterns.reflexion import Reflexion
from branching.patterns.speculate import Speculate
from branching.patterns.tournament import Tournament
from branching.patterns.tree_of_thoughts import TreeOfThoughts

__all__ = [
    "BeamSearch",
    "BestOfN",
    "Cascaded",
    "Event",
    "Reflexion",
    "Speculate",
    "SpeculationOutcome",
    "SpeculationResult",
    "Tournament",
    "TreeOfThoughts",
]
