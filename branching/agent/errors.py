"""Exceptions of agent forks, below the library's own tree.

    Exception
    ├── ForkBranchLimitError        more branches than max_branches; nothing was forked
    ├── ForkDepthLimitError         a fork within forks deeper than max_depth; nothing was forked
    └── BranchingError
        ├── ForkStateError          the fork, or a branch, is not in the state for that; also a
        │                           RuntimeError
        ├── ForkStoreError          the state of forks cannot be read or written
        ├── BudgetExhausted         a request was refused before it was sent; the branch stops
        │   └── UnknownPriceError   … because a budget in money needs a price
        └── ConflictError
            └── MergeConflictError  others changed the same paths; nothing was merged

A wrong argument (no specs, an unknown branch id) is a ValueError.
"""

from __future__ import annotations

from typing import Literal

from branching.errors import BranchingError, ConflictError


class ForkBranchLimitError(Exception):
    """More branches were asked for than `max_branches` allows. Nothing was forked."""


class ForkDepthLimitError(Exception):
    """The parent is `max_depth` forks deep already. Nothing was forked."""


class ForkStateError(BranchingError, RuntimeError):
    """The operation requires another state of the fork, or of one of its branches."""


class ForkStoreError(BranchingError):
    """The state of forks cannot be read or written. Runs and files are as they were."""


class BudgetExhausted(BranchingError):
    """A request would cross a cap, and was not sent. The conversation is kept; the branch can win.

    `scope` says whose cap: the branch's, or that of the fork, which stops all its branches.
    """

    def __init__(self, message: str, *, scope: Literal["branch", "aggregate"], limit: str) -> None:
        super().__init__(message, limit=limit)
        self.scope = scope


class UnknownPriceError(BudgetExhausted):
    """The price of a request is unknown, so a budget in money cannot be enforced.

    The request was not sent. A program that reports a request afterwards is stopped.
    """


class MergeConflictError(ConflictError):
    """Others changed the same paths since the fork. Nothing was merged, the fork is still open."""
