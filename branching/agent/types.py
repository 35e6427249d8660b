"""What is said about a fork: its specification, its states, its results. Values, no behaviour.

Names, fields and defaults are those of pydantic-deep's Live Run Forking, so that code and habits
carry over. What goes beyond it is keyword-only and has a default. Paths are relative to the
workspace, with `/`; money is in US dollars, times are UTC.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Protocol

from branching.fs import PRIVILEGE_WARNINGS_MAX, Change, privilege_warnings

DEFAULT_JUDGE_MODEL = "anthropic:claude-haiku-4-5"
"""A cheap model: a judge reads one prompt of at most 32 000 characters."""

BranchState = Literal[
    "running", "done", "failed", "terminated", "budget_exhausted", "aggregate_budget_exhausted"
]
MergeKind = Literal["manual", "auto", "auto_with_fallback", "vote"]
OnConflict = Literal["keep", "theirs", "fail", "merge3"]
"""How a merge handles a path that both the branch and the parent changed since the fork.

keep      keep the parent's content and report the path
theirs    take the branch's content and report the path
fail      merge nothing: MergeConflictError
merge3    merge text by lines, as git does; keep the parent's side of overlaps and report the path
"""
FileOp = Literal["write", "edit", "delete", "mkdir", "rmdir"]
Operation = Literal["created", "modified", "deleted", "untouched"]
Agreement = Literal["unanimous_change", "unanimous_no_change", "split", "unique"]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits on the usage of a branch or a fork. None means no limit."""

    usd: float | None = None
    tokens: int | None = None
    """Input and output together."""
    requests: int | None = None
    seconds: float | None = None
    """Wall time of the run."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value >= 0:  # a NaN is never reached
                raise ValueError(f"the budget's {name} must be a number of 0 or more, not {value}")


@dataclass(frozen=True)
class BranchSpec:
    """A branch to fork: its label, and its instructions in addition to the shared history."""

    label: str
    """Not empty, and unique in its fork."""
    steer: str
    """The prompt with which the branch continues."""
    model: str | None = None
    """None is the parent's model."""
    budget_usd: float | None = None
    extra_instructions: str | None = None
    budget: Budget = field(default=Budget(), kw_only=True)
    """Limits beyond money. `budget_usd` goes before `budget.usd`."""

    @property
    def limits(self) -> Budget:
        """The whole budget."""
        usd = self.budget.usd if self.budget_usd is None else self.budget_usd
        return Budget(
            usd=usd,
            tokens=self.budget.tokens,
            requests=self.budget.requests,
            seconds=self.budget.seconds,
        )


@dataclass(frozen=True)
class BranchIsolation:
    """What branches have of their own. A fork without a workspace shares the files in any case."""

    history: Literal["copy"] = "copy"
    backend: Literal["copy", "share_readonly", "share"] = "copy"
    """Files: a branch of one's own, the frozen parent to read, or the parent's to write too."""
    memory: Literal["copy", "share_readonly", "share"] = "copy"
    """Recorded; memory is files, and follows the backend."""
    todos: Literal["copy", "share_readonly", "share"] = "copy"
    """With "copy" a branch starts with an empty list."""
    message_queue: Literal["isolated", "shared"] = "isolated"
    team_bus: Literal["shared", "isolated"] = "shared"

    def __post_init__(self) -> None:
        if self.history != "copy":
            raise ValueError("history is always copied: two runs cannot write one conversation")


@dataclass(frozen=True)
class MergeStrategy:
    """Who chooses the winner, and when that is committed without asking."""

    kind: MergeKind = "auto_with_fallback"
    judge_model: str = DEFAULT_JUDGE_MODEL
    judge_models: Sequence[str] | None = None
    """For `vote`; None picks three."""
    confidence_threshold: float = 0.80


@dataclass(frozen=True, kw_only=True)
class BranchStatus:
    """A branch as it stands."""

    id: str
    label: str
    state: BranchState
    current_turn: int = 0
    last_activity_at: datetime
    last_message_preview: str = ""
    error: str | None = None

    def __str__(self) -> str:
        """Returns the id, so that `f"pick:{handle.branches[0]}"` names the branch."""
        return self.id


@dataclass(frozen=True, kw_only=True)
class ForkHandle:
    """A fork that was made."""

    fork_id: str
    parent_checkpoint_id: str | None
    """The checkpoint of the parent's conversation and files, where there is a checkpoint store."""
    branches: tuple[BranchStatus, ...]
    """As they were when the fork was made, in the order of the specs."""
    merge_strategy: MergeStrategy
    created_at: datetime


@dataclass(frozen=True, kw_only=True)
class FileChange:
    """One change that a branch made."""

    path: str
    op: FileOp
    timestamp: datetime


@dataclass(frozen=True, kw_only=True)
class FlushError:
    """A path that could not be merged."""

    path: str
    op: FileOp
    message: str


@dataclass(frozen=True, kw_only=True)
class FlushReport:
    """What of a branch's files reached the parent."""

    applied_paths: tuple[str, ...] = ()
    """Files that are in the parent as the branch, or the merge of both, left them. Sorted."""
    applied_changes: int = 0
    """How many changes that were, directories and attributes too."""
    conflicts: tuple[str, ...] = ()
    """Paths that were also changed in the parent. The policy decides which content is taken."""
    errors: tuple[FlushError, ...] = ()
    deleted_paths: tuple[str, ...] = ()
    """Those that the merge deleted in the parent."""
    unselected: tuple[str, ...] = ()
    """Paths that the branch changed and `MergeOptions` left out."""
    privileged: tuple[Change, ...] = ()
    """For a merge into the workspace: files that give rights to all users who execute them."""


@dataclass(frozen=True, kw_only=True)
class MergeResult:
    """The end of a fork that had a winner."""

    fork_id: str
    winner_branch_id: str
    discarded_branches: tuple[str, ...]
    history_after_merge: Any
    """The winner's conversation, with which the parent continues."""
    applied_paths: tuple[str, ...] = ()
    applied_changes: int = 0
    conflicts: tuple[str, ...] = ()
    errors: tuple[FlushError, ...] = ()
    deleted_paths: tuple[str, ...] = ()
    blocked_commands: tuple[str, ...] = ()
    """What the winner asked to do and was denied."""
    winner_label: str = ""
    unselected: tuple[str, ...] = ()
    """Paths that the winner changed and `MergeOptions` left out."""
    privileged: tuple[Change, ...] = ()
    """The merged files that give rights to all users who execute them; see `Change.privileges`."""

    @property
    def notice(self) -> str:
        """The merge in words: the winner, the files, what did not go smoothly."""
        warnings = privilege_warnings(self.privileged, PRIVILEGE_WARNINGS_MAX)
        return "\n".join([*self.notice_lines(), *warnings])

    def notice_lines(self) -> list[str]:
        """Returns the lines of the notice, without the warnings about privileges."""
        lines = [f"Merged: kept branch {self.winner_label or self.winner_branch_id}"]
        lines.append(
            _counted(len(self.applied_paths), "file") + " applied" + _listed(self.applied_paths)
        )
        if self.deleted_paths:
            lines.append(
                _counted(len(self.deleted_paths), "file") + " deleted" + _listed(self.deleted_paths)
            )
        if self.conflicts:
            lines.append(_counted(len(self.conflicts), "conflict") + _listed(self.conflicts))
        lines += [f"error: {error.path}: {error.message}" for error in self.errors]
        lines += [f"denied: {command}" for command in self.blocked_commands]
        return lines


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    """How the winner's files are merged."""

    on_conflict: OnConflict = "keep"
    own: Literal["fail", "force", "skip"] = "fail"
    """Of what the parent itself changed, and others in the base directory too: nothing is merged,
    the parent's lands, or the others' stays."""
    atomic: bool = True
    """All or nothing. Otherwise a path that cannot be written is left out and reported."""
    only: tuple[str, ...] = ()
    """Paths to merge, or directories of such; empty is all."""
    exclude: tuple[str, ...] = ()
    hunks: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Of a text file, which hunks (numbers from 0, in the order of the diff) are taken."""


@dataclass(frozen=True, kw_only=True)
class BranchChange:
    """What one branch did to one path, by the path's existence before and its final content."""

    branch_id: str
    branch_label: str
    operation: Operation
    new_content: str | None = None
    """None for deleted paths, binary files and other types."""
    unified_diff_vs_parent: str | None = None
    size_bytes: int = 0
    is_binary: bool = False
    identity: str = ""
    """Type, mode and digest of the content (or the target of a link). Equal: the same result."""
    renamed_from: str | None = None
    """Where the same content was in the parent, if it was deleted there."""


@dataclass(frozen=True, kw_only=True)
class PathDiff:
    """One path over all branches of a fork."""

    path: str
    parent_content: str | None
    """As it was at the fork; None where it was absent or binary."""
    branches: Mapping[str, BranchChange]
    """One for each branch of the fork, also where untouched."""
    agreement: Agreement


@dataclass(frozen=True, kw_only=True)
class DiffSummary:
    """The diff in numbers."""

    total_paths_touched: int
    unanimous_paths: int
    split_paths: int
    per_branch_unique: Mapping[str, int]
    agreement_score: float
    """1 - split / total: 1.0 where no two branches disagree."""


@dataclass(frozen=True, kw_only=True)
class BranchDiffReport:
    """What the branches of a fork did, path by path. `paths` is sorted by name."""

    fork_id: str
    paths: tuple[PathDiff, ...]
    summary: DiffSummary


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What was used: by one request, or by all of them."""

    usd: float | None = 0.0
    """None where the price is unknown."""
    tokens: int = 0
    requests: int = 0

    def __add__(self, other: Usage) -> Usage:
        known = [usd for usd in (self.usd, other.usd) if usd is not None]
        # Nothing used has no price to be unknown.
        is_unknown = (self.usd is None and self.requests) or (other.usd is None and other.requests)
        return Usage(
            usd=None if is_unknown or not known else sum(known),
            tokens=self.tokens + other.tokens,
            requests=self.requests + other.requests,
        )


@dataclass(frozen=True, kw_only=True)
class BranchCost:
    """What a branch has cost."""

    branch_id: str
    branch_label: str
    cumulative_usd: float | None
    """None where a price is unknown."""
    budget_usd: float | None
    remaining_usd: float | None
    state: BranchState
    tokens: int = 0
    requests: int = 0


@dataclass(frozen=True, kw_only=True)
class ForkCostSummary:
    """What a fork has cost."""

    fork_id: str
    per_branch: tuple[BranchCost, ...]
    aggregate_usd: float | None
    """The sum of the costs that are known; None when none is."""
    aggregate_budget_usd: float | None
    aggregate_remaining_usd: float | None


@dataclass(frozen=True, kw_only=True)
class BranchOutcome:
    """A branch as a judge sees it: never the whole conversation."""

    branch_id: str
    label: str
    state: BranchState
    final_message: str
    cost_usd: float | None
    turns: int
    error_count: int
    """1 if it ended in an error, else 0."""
    retry_count: int = 0
    stuck_loop_hits: int = 0
    test_pass_ratio: float | None = None
    """None: there were no tests, or they could not be run."""


@dataclass(frozen=True, kw_only=True)
class ConfidenceSignals:
    """What confidence is computed from, beside the judge's own; each from 0 to 1."""

    quality_spread: float
    test_pass_ratio: float | None
    internal_consistency: float
    custom: Mapping[str, float] = field(default_factory=dict)


class Verdict(Protocol):
    """What a judge says. `JudgeVerdict` of the pydantic side has these, and more."""

    @property
    def winner_branch_id(self) -> str: ...
    @property
    def confidence(self) -> float: ...
    @property
    def reasoning(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class ResolveOutcome:
    """What `resolve` came to."""

    committed: bool
    auto_eligible: bool
    """The judge is sure enough that the caller may commit its pick without asking."""
    verdict: Verdict | None = None
    signals: ConfidenceSignals | None = None
    effective_confidence: float | None = None
    merge_result: MergeResult | None = None
    judge_usage: Usage | None = None
    """Not part of any branch's cost."""


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _listed(paths: Sequence[str], at_most: int = 20) -> str:
    if not paths:
        return ""
    more = f", and {len(paths) - at_most} more" if len(paths) > at_most else ""
    return ": " + ", ".join(paths[:at_most]) + more
