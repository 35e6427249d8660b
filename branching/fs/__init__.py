"""The file system layer: workspaces and their branches. It knows no processes and no patterns."""

from __future__ import annotations

from branching.fs.backend import (
    PRIVILEGE_WARNINGS_MAX,
    BranchRecord,
    Change,
    CommitRecord,
    DiffSummary,
    Reversal,
    privilege_warnings,
)
from branching.fs.branch import Branch
from branching.fs.workspace import Workspace

__all__ = [
    "PRIVILEGE_WARNINGS_MAX",
    "Branch",
    "BranchRecord",
    "Change",
    "CommitRecord",
    "DiffSummary",
    "Reversal",
    "Workspace",
    "privilege_warnings",
]
