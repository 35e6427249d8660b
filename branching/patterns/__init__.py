"""The patterns: ways to try candidates in branches and to choose one.

Configure a pattern and call it with a Workspace, or with a Branch to work inside that. The result
is a SpeculationOutcome. All patterns use one runner (`runner.py`). Each name imports its module on
first use, so that code that needs only events loads none of the patterns.
"""

from branching._lazy import lazy_exports

# Type checkers know this name; it need not be imported.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from branching.patterns.beam_search import BeamSearch
    from branching.patterns.best_of_n import BestOfN
    from branching.patterns.cascaded import Cascaded
    from branching.patterns.outcome import SpeculationOutcome, SpeculationResult
    from branching.patterns.reflexion import Reflexion
    from branching.patterns.speculate import Speculate
    from branching.patterns.tournament import Tournament
    from branching.patterns.tree_of_thoughts import TreeOfThoughts
    from branching.runlog.events import Event

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
    "BeamSearch": ".beam_search",
    "BestOfN": ".best_of_n",
    "Cascaded": ".cascaded",
    "Event": "branching.runlog.events",
    "Reflexion": ".reflexion",
    "Speculate": ".speculate",
    "SpeculationOutcome": ".outcome",
    "SpeculationResult": ".outcome",
    "Tournament": ".tournament",
    "TreeOfThoughts": ".tree_of_thoughts",
}
"""The module of each name."""


__getattr__ = lazy_exports(__name__, _HOME)
