"""Unified branching for speculative execution: filesystem, process, and memory.

    from branching import Speculate, Workspace

    outcome = Speculate([first_fix, second_fix])(Workspace("/workspace"))

Importing the package loads this file only. Each name imports its layer on first use: `Workspace`
imports the file system layer, `Speculate` the patterns and the file system layer.
"""

# Type checkers know this name. Importing typing for it would double the start-up time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from branching.errors import (
        AbortError,
        BranchError,
        BranchingError,
        BranchNotFoundError,
        BranchStaleError,
        ClusterError,
        CommitError,
        ConflictError,
        ForkError,
        MemoryBranchError,
        MountError,
        NamespaceError,
        ProcessBranchError,
        RecoveryError,
        SetupError,
    )
    from branching.fs import (
        Branch,
        BranchRecord,
        Change,
        CommitRecord,
        DiffSummary,
        Reversal,
        Workspace,
    )
    from branching.patterns import (
        BeamSearch,
        BestOfN,
        Cascaded,
        Event,
        Reflexion,
        Speculate,
        SpeculationOutcome,
        SpeculationResult,
        Tournament,
        TreeOfThoughts,
    )
    from branching.process import BranchContext, ResourceLimits
    from branching.session import Cell, Child, Session

__version__ = "0.2.0"

__all__ = [
    "AbortError",
    "BeamSearch",
    "BestOfN",
    "Branch",
    "BranchContext",
    "BranchError",
    "BranchNotFoundError",
    "BranchRecord",
    "BranchStaleError",
    "BranchingError",
    "Cascaded",
    "Cell",
    "Change",
    "Child",
    "ClusterError",
    "CommitError",
    "CommitRecord",
    "ConflictError",
    "DiffSummary",
    "Event",
    "ForkError",
    "MemoryBranchError",
    "MountError",
    "NamespaceError",
    "ProcessBranchError",
    "RecoveryError",
    "Reflexion",
    "ResourceLimits",
    "Reversal",
    "Session",
    "SetupError",
    "Speculate",
    "SpeculationOutcome",
    "SpeculationResult",
    "Tournament",
    "TreeOfThoughts",
    "Workspace",
]

_HOME = {
    "Branch": "branching.fs",
    "BranchRecord": "branching.fs",
    "Change": "branching.fs",
    "CommitRecord": "branching.fs",
    "DiffSummary": "branching.fs",
    "Reversal": "branching.fs",
    "Workspace": "branching.fs",
    "BeamSearch": "branching.patterns",
    "BestOfN": "branching.patterns",
    "Cascaded": "branching.patterns",
    "Event": "branching.patterns",
    "Reflexion": "branching.patterns",
    "Speculate": "branching.patterns",
    "SpeculationOutcome": "branching.patterns",
    "SpeculationResult": "branching.patterns",
    "Tournament": "branching.patterns",
    "TreeOfThoughts": "branching.patterns",
    "BranchContext": "branching.process",
    "ResourceLimits": "branching.process",
    "Cell": "branching.session",
    "Child": "branching.session",
    "Session": "branching.session",
}
"""The module of each public name that is not an exception."""
_LAYERS = frozenset({"fs", "patterns", "process", "session"})
"""Layers that annotations refer to. They are imported when an annotation is evaluated."""


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _LAYERS:
        return import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOME.get(name, "branching.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
