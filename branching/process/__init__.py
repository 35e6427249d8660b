"""The process layer: what runs in a branch, and dies whole. It knows no file system.

A name loads its file when it is first used: the server that forks for all of us loads this package
too, and needs next to nothing of it.
"""

from branching._lazy import lazy_exports

# Type checkers know this name; it need not be imported.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from branching.process.call_limits import CallLimits
    from branching.process.command import Command
    from branching.process.context import BranchContext, Result
    from branching.process.limits import ResourceLimits, parse_memory_size
    from branching.process.pipes import Sink
    from branching.process.process_result import Ended
    from branching.process.run_as import Owner
    from branching.process.sandbox import OWN_TMP, Isolation, Sandbox, validate_isolation

__all__ = [
    "OWN_TMP",
    "BranchContext",
    "CallLimits",
    "Command",
    "Ended",
    "Isolation",
    "Owner",
    "ResourceLimits",
    "Result",
    "Sandbox",
    "Sink",
    "parse_memory_size",
    "validate_isolation",
]

_HOME = {
    "BranchContext": ".context",
    "CallLimits": ".call_limits",
    "Command": ".command",
    "Ended": ".process_result",
    "Isolation": ".sandbox",
    "OWN_TMP": ".sandbox",
    "Owner": ".run_as",
    "ResourceLimits": ".limits",
    "Result": ".context",
    "Sandbox": ".sandbox",
    "Sink": ".pipes",
    "validate_isolation": ".sandbox",
    "parse_memory_size": ".limits",
}
"""Which module of this package has the name."""


__getattr__ = lazy_exports(__name__, _HOME)
