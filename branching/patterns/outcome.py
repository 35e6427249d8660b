"""The result of a call of a pattern, and of each of its candidates.

Code that runs one command does not load these classes: Python takes 0.6 ms to make each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import branching
from branching.fs import Branch, Change, DiffSummary
from branching.patterns.results import State

if TYPE_CHECKING:
    import branching.process


@dataclass(frozen=True, kw_only=True)
class SpeculationResult:
    """The result of one candidate."""

    branch_index: int
    """Index in the list of candidates, or number of the attempt, from 0."""
    success: bool
    score: float = 0.0
    return_value: object = None
    """Return value of the candidate, unchanged."""
    exception: BaseException | None = None
    """Exception of the candidate; TimeoutError if a time limit expired before it ended."""
    branch_path: Path | None = None
    """Directory of its branch, which exists only if `kept`; None if it was not started."""
    exit_code: int = 0
    """Exit code of a command; 0 or 1 for a function."""
    state: State = "failed"
    duration: float = 0.0
    """Running time in seconds."""
    branch_name: str = ""
    """Name of its branch."""
    label: str = ""
    """Display name: the command as given, or the name of the function."""
    changes: DiffSummary | None = None
    """Changes since the fork of its branch. None if they were not determined: the candidate was
    stopped, or succeeded after another one had won."""
    kept: bool = False
    """Whether its branch is still open."""
    process: branching.process.Ended | None = None
    """Exit status and resource usage of its process; None if it had no separate process."""
    node: str = ""
    """Name of the node of the cluster that ran it; empty for this machine."""


@dataclass(frozen=True, kw_only=True)
class SpeculationOutcome:
    """The result of a call of a pattern."""

    committed: bool = False
    winner: SpeculationResult | None = None
    all_results: list[SpeculationResult] = field(default_factory=list)
    """One result per candidate, in candidate order."""
    branch: Branch | None = None
    """The winner's branch, if it is still open: with `commit=False`, or after a partial commit.
    The caller must commit or abort it."""
    changes: list[Change] = field(default_factory=list)
    """The committed changes, sorted by path."""
    commit_id: int | None = None
    """Id of the commit in the history, for `Workspace.undo`; None if it cannot be undone."""
    remaining: int = 0
    """Number of paths changed by the winner that were not committed. `branch` is open with them."""
    timed_out: bool = False
    """Whether the time limit expired before the call had a winner."""
