"""Detects edits that a person makes in a branch's directory while an agent's run uses it.

After each step of the run, the runner calls `mark`. Differences between the mark and the start of
the next step are external edits. That includes changes by background programs of the run. The cost
is one lstat for each path that the branch has changed.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping

from branching.agent.changed_paths import touched
from branching.fs import Branch
from branching.fs.confined_dir import ConfinedDir

_LISTED_MAX = 50
Signature = tuple[int, int, int, int, int] | None


class EditWatch:
    """Watches one branch. All of it blocks."""

    def __init__(self, branch: Branch, base: ConfinedDir, tree: ConfinedDir) -> None:
        self._branch = branch
        self._base = base
        self._tree = tree
        self._known = self._snapshot()

    def mark(self) -> None:
        """Sets the mark: the present state is the run's own work."""
        self._known = self._snapshot()

    def edits(self) -> list[str]:
        """Returns the paths that were changed since the last mark, and sets a new one."""
        before, self._known = self._known, self._snapshot()
        paths = {*before, *self._known}
        return sorted(path for path in paths if before.get(path) != self._known.get(path))

    def _snapshot(self) -> Mapping[str, Signature | str]:
        paths = touched(self._branch.diff(), self._base, self._tree)
        return {path: self._signature(path) for path in paths}

    def _signature(self, path: str) -> Signature | str:
        found = self._tree.lstat(path)
        if found is None:
            return "gone"
        if stat.S_ISDIR(found.st_mode):
            return "directory"  # its times change with its content
        return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def describe_edits(paths: list[str]) -> str:
    """Returns the edits in words for the model; "" for none."""
    if not paths:
        return ""
    more = f"\n… and {len(paths) - _LISTED_MAX} more" if len(paths) > _LISTED_MAX else ""
    listed = "\n".join(f"- {path}" for path in paths[:_LISTED_MAX])
    return f"These files were changed outside of this run since your last step:\n{listed}{more}"
