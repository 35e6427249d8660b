"""A fork's diff report side by side: each path that a branch touched, before and after."""

from __future__ import annotations

from branching.agent.types import BranchChange, BranchDiffReport, PathDiff
from branching.tui.diff.line_diff import Comparison, compare

_LETTERS = {"created": "A", "modified": "M", "deleted": "D"}


class ReportSource:
    """The touched paths times the branches that touched them."""

    left_name = "at the fork"
    right_name = "in the branch"

    def __init__(self, report: BranchDiffReport) -> None:
        self._found = {
            _name(diff, change): (diff, change)
            for diff in report.paths
            for change in diff.branches.values()
            if change.operation in _LETTERS
        }
        self.paths = tuple(self._found)

    def title(self, path: str) -> str:
        """Returns the line of one of them, which says all by itself."""
        return path

    def compared(self, path: str) -> Comparison:
        """Compares one path in one branch with what it was."""
        diff, change = self._found[path]
        before, after = diff.parent_content, change.new_content
        if change.is_binary or (before is None and after is None):
            return Comparison(path=diff.path, note=change.unified_diff_vs_parent or "[no text]")
        return compare(
            diff.path,
            None if before is None else before.encode(),
            None if after is None else after.encode(),
        )


def _name(diff: PathDiff, change: BranchChange) -> str:
    letter = _LETTERS[change.operation]
    return f"{letter} {diff.path} · {change.branch_label} ({diff.agreement})"
