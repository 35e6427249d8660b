"""The process layer: what runs in a branch, and dies whole. It knows no file system.

A name loads its file when it is first used: the server that forks for all of us loads this package
too, and needs next to nothing of it.
"""

# Type checkers know this name; it need not be imported.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from branching.process.budget import Budget, told
    from branching.process.command import Command
    from branching.process.context import BranchContext, Result
    from branching.process.end import Ended
    from branching.process.limits import ResourceLimits, parse_memory_size
    from branching.process.owner import Owner
    from branching.process.pipes import Sink
    from branching.process.sandbox import OWN_TMP, Isolation, Sandbox, check_walls

__all__ = [
    "OWN_TMP",
    "BranchContext",
    "Budget",
    "Command",
    "Ended",
    "Isolation",
    "Owner",
    "ResourceLimits",
    "Result",
    "Sandbox",
    "Sink",
    "check_walls",
    "parse_memory_size",
    "told",
]

_HOME = {
    "BranchContext": "context",
    "Budget": "budget",
    "Command": "command",
    "Ended": "end",
    "Isolation": "sandbox",
    "OWN_TMP": "sandbox",
    "Owner": "owner",
    "ResourceLimits": "limits",
    "Result": "context",
    "Sandbox": "sandbox",
    "Sink": "pipes",
    "check_walls": "sandbox",
    "parse_memory_size": "limits",
    "told": "budget",
}
"""Which module of this package has the name."""


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
