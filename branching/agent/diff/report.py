"""Compares the changes of a fork's branches, path by path.

The file system lists the changes of each branch, so the cost depends on the number of changed files
only. Each is read once in each branch that changed it, and once in its state at the fork. Branches
may be written meanwhile; a path that is removed while it is read counts as deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from branching.agent.branch_runtime import BranchRuntime
from branching.agent.changed_paths import touched
from branching.agent.diff.snapshot import PathSnapshot, TreeSnapshot
from branching.agent.diff.text import binary_label, text_of, unified
from branching.agent.types import Agreement, BranchChange, BranchDiffReport, DiffSummary, PathDiff
from branching.fs import Branch
from branching.fs.confined_dir import ConfinedDir


def build_diff_report(
    fork_id: str,
    runtimes: Mapping[str, BranchRuntime] | Iterable[BranchRuntime],
    *,
    paths_filter: Sequence[str] | None = None,
) -> BranchDiffReport:
    """Compares the branches with the state at the fork. They may be running.

    `paths_filter` selects paths, including those that no branch has touched. The summary is always
    of all paths, because a filter that leaves out disagreements must not improve the score.

    Raises:
        BranchError: A branch cannot be read.
    """
    branches = list(runtimes.values() if isinstance(runtimes, Mapping) else runtimes)
    bases: dict[Path, TreeSnapshot] = {}  # the branches of a fork have one
    sides = {
        runtime.id: _Side(
            runtime,
            runtime.branch,
            bases.setdefault(
                runtime.base_path, TreeSnapshot(ConfinedDir(runtime.base_path, runtime.owner))
            ),
        )
        for runtime in branches
        if runtime.branch is not None and runtime.base_path is not None
    }
    everything = sorted({path for side in sides.values() for path in side.touched})
    diffs = {path: _path_diff(path, branches, sides) for path in everything}
    wanted = everything if paths_filter is None else sorted({_normal(p) for p in paths_filter})
    return BranchDiffReport(
        fork_id=fork_id,
        paths=tuple(diffs.get(path) or _path_diff(path, branches, sides) for path in wanted),
        summary=_summary(diffs.values(), branches),
    )


class _Side:
    """One branch: its files, what it was forked from, and what it touched."""

    def __init__(self, runtime: BranchRuntime, branch: Branch, base: TreeSnapshot) -> None:
        self.base = base
        self.now = TreeSnapshot(ConfinedDir(branch.path, runtime.owner))
        found = touched(branch.diff(), base.tree, self.now.tree)
        self.touched = {path for path in found if self._is_told(path)}
        self._renamed = self._renames()

    def _is_told(self, path: str) -> bool:
        """Lists a directory only if it is added or removed empty; else its files are listed."""
        before, after = self.base.at(path), self.now.at(path)
        there = after if after.is_there else before
        if not there.is_directory:
            return there.is_there
        if after.is_there and before.is_directory:
            return False  # its attributes
        tree = self.now.tree if after.is_there else self.base.tree
        return next(iter(tree.walk(path)), None) is None

    def _renames(self) -> dict[str, str]:
        """Pairs files that came with files of the same content that went. Empty ones do not."""
        gone: dict[str, list[str]] = {}
        for path in sorted(self.touched):
            if not self.now.at(path).is_there and (was := self.base.at(path).content_digest):
                gone.setdefault(was, []).append(path)
        pairs = {}
        for path in sorted(self.touched) if gone else ():
            came = None if self.base.at(path).is_there else self.now.at(path).content_digest
            if came and gone.get(came):
                pairs[path] = gone[came].pop(0)
        return pairs

    def told(
        self, untouched: BranchChange, path: str, diffs: dict[str, str | None]
    ) -> BranchChange:
        """Returns what the branch did to the path; `diffs` are those of equal results."""
        if path not in self.touched:
            return untouched
        before, after = self.base.at(path), self.now.at(path)
        if after.identity not in diffs:
            diffs[after.identity] = _diff(before, after, path)
        diff = diffs[after.identity]
        if not after.is_there:
            return replace(untouched, operation="deleted", unified_diff_vs_parent=diff)
        text = None if after.data is None else text_of(after.data)
        return replace(
            untouched,
            operation="modified" if before.is_there else "created",
            new_content=text,
            unified_diff_vs_parent=diff,
            size_bytes=after.size,
            is_binary=after.is_file and text is None,
            identity=after.identity,
            renamed_from=self._renamed.get(path),
        )


def _path_diff(
    path: str, branches: Sequence[BranchRuntime], sides: Mapping[str, _Side]
) -> PathDiff:
    changes = {}
    diffs: dict[str, str | None] = {}
    for branch in branches:
        change = BranchChange(
            branch_id=branch.id, branch_label=branch.spec.label, operation="untouched"
        )
        side = sides.get(branch.id)
        changes[branch.id] = change if side is None else side.told(change, path, diffs)
    base = next((side.base for side in sides.values()), None)
    before = None if base is None else base.at(path).data
    return PathDiff(
        path=path,
        parent_content=None if before is None else text_of(before),
        branches=changes,
        agreement=_agreement(changes.values()),
    )


def _agreement(changes: Iterable[BranchChange]) -> Agreement:
    touching = [change for change in changes if change.operation != "untouched"]
    if not touching:
        return "unanimous_no_change"
    if len(touching) == 1:
        return "unique"
    return "split" if len({change.identity for change in touching}) > 1 else "unanimous_change"


def _summary(diffs: Iterable[PathDiff], branches: Sequence[BranchRuntime]) -> DiffSummary:
    unanimous = split = total = 0
    unique = {branch.id: 0 for branch in branches}
    for diff in diffs:
        total += 1
        unanimous += diff.agreement == "unanimous_change"
        split += diff.agreement == "split"
        if diff.agreement == "unique":
            [one] = [c for c in diff.branches.values() if c.operation != "untouched"]
            unique[one.branch_id] += 1
    return DiffSummary(
        total_paths_touched=total,
        unanimous_paths=unanimous,
        split_paths=split,
        per_branch_unique=unique,
        agreement_score=1 - split / max(total, 1),
    )


def _diff(before: PathSnapshot, after: PathSnapshot, path: str) -> str | None:
    if after.is_file and after.data is None:
        return f"[too big to be compared · {after.size} bytes · {after.identity}]\n"
    new = after.data if after.is_there else b""
    texts = [None if data is None else text_of(data) for data in (before.data or b"", new)]
    if texts[0] is None or texts[1] is None:
        return None if new is None else f"{binary_label(new)}\n"
    return unified(texts[0], texts[1], path)


def _normal(path: str) -> str:
    return str(PurePosixPath(path))
