"""The patterns: ways to try candidates in branches and to choose one.

Configure a pattern, call it with a Workspace (or a Branch, to work inside that), get a
SpeculationOutcome. One runner serves them all (`runner.py`). A name loads its file when it is first
used: whoever needs an event, or how a call is cancelled, loads none of the patterns.
"""

# Type checkers know this name; it need not be imported.
TYPE_CHECKING = False
if TYPE_CHECKING:
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

_HOME = {
    "BeamSearch": "beam_search",
    "BestOfN": "best_of_n",
    "Cascaded": "cascaded",
    "Event": "event",
    "Reflexion": "reflexion",
    "Speculate": "speculate",
    "SpeculationOutcome": "outcome",
    "SpeculationResult": "outcome",
    "Tournament": "tournament",
    "TreeOfThoughts": "tree_of_thoughts",
}
"""Which module of this package has the name."""


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
