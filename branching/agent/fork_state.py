"""The saved state of a fork, from which it can be resumed after its process has died.

    making ──> open ──> merging ──> resolved        abort_fork, aclose: ──> resolved
                 ^         │
                 └─────────┘ the merge was refused

Each phase is saved before its step. Which branches exist then shows whether the step was completed
before the process died. A resolved fork is kept only as long as its merge can be overridden.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from branching.agent.types import (
    BranchIsolation,
    BranchSpec,
    BranchStatus,
    Budget,
    MergeStrategy,
    Usage,
)

Phase = Literal["making", "open", "merging", "resolved"]


@dataclass(frozen=True, kw_only=True)
class KeptBranch:
    """One branch of a fork."""

    spec: BranchSpec
    status: BranchStatus
    files: str | None
    """Name of its BranchFS branch; None if it has no files."""
    usage: Usage = field(default_factory=Usage)
    history: bytes = b""
    """Its conversation so far, as the codec dumps it; empty before the first request."""
    blocked: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ForkState:
    """One fork."""

    fork_id: str
    phase: Phase
    created_at: datetime
    workspace: str | None
    """Root of the mount; None for a fork that shares the files."""
    parent: str | None
    """Name of the BranchFS branch that was forked; None is main."""
    parent_files: str | None
    """Name of the branch in which the parent continues while the fork is open."""
    forked_ns: int
    """The file system's clock at the fork: what has changed in the base since is newer."""
    parent_history: bytes
    isolation: BranchIsolation = field(default_factory=BranchIsolation)
    strategy: MergeStrategy = field(default_factory=MergeStrategy)
    budget: Budget = field(default_factory=Budget)
    """Of all branches together."""
    depth: int = 0
    parent_checkpoint_id: str | None = None
    carrier: str | None = None
    """While merging: the BranchFS branch whose commit decides the merge."""
    winner: str | None = None
    about: dict[str, Any] = field(default_factory=dict)
    """What the front end wants to find again, as JSON has it."""
    branches: tuple[KeptBranch, ...] = ()
