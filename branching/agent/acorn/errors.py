"""What goes wrong with a branch that code has started."""

from __future__ import annotations

from branching.errors import BranchingError


class BranchError(BranchingError):
    """A branch came to nothing: it failed, ran out of its steps, or could not be begun. Nothing of
    it is in the parent's conversation or files."""
