"""What the branches of a fork did, path by path, and where they agree.

The file system tells what each branch changed, so the cost follows the changed files. Branches may
go on writing meanwhile: a path that goes while it is read counts as deleted.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from branching.agent.diff.text import TEXT_BYTES_MAX, binary_label, text_of, unified
from branching.agent.files import read_whole
from branching.agent.identity import identity
from branching.agent.runtime import BranchRuntime
from branching.agent.touched import touched
from branching.agent.types import Agreement, BranchChange, BranchDiffReport, DiffSummary, PathDiff
from branching.fs import Branch
from branching.fs.beneath import Tree


def build_diff_report(
    fork_id: str,
    runtimes: Mapping[str, BranchRuntime] | Iterable[BranchRuntime],
    *,
    paths_filter: Sequence[str] | None = None,
) -> BranchDiffReport:
    """Compares the branches with what was forked, in whatever state they are.

    `paths_filter` keeps these paths only, also those that no branch has touched. The summary is of
    all paths in any case: leaving out the disagreements must not make a perfect score. Raises
    BranchError if a branch cannot be read.
    """
    branches = list(runtimes.values() if isinstance(runtimes, Mapping) else runtimes)
    sides = {
        runtime.id: _Side(runtime, runtime.branch, runtime.base_path)
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
    """One branch: its tree, what it was forked from, and what it touched."""

    def __init__(self, runtime: BranchRuntime, branch: Branch, base: Path) -> None:
        self.base = Tree(base, runtime.owner)
        self.tree = Tree(branch.path, runtime.owner)
        found = touched(branch.diff(), self.base, self.tree)
        self.touched = {path for path in found if self._is_told(path)}
        self._renamed = self._renames()

    def _is_told(self, path: str) -> bool:
        """Directories are told where one comes or goes empty; else by the files in them."""
        before, after = self.base.lstat(path), self.tree.lstat(path)
        there = after or before
        if there is None or not stat.S_ISDIR(there.st_mode):
            return there is not None
        if before is not None and after is not None and stat.S_ISDIR(before.st_mode):
            return False  # its attributes
        tree = self.tree if after is not None else self.base
        return next(iter(tree.walk(path)), None) is None

    def _renames(self) -> dict[str, str]:
        """Pairs files that came with files of the same content that went. Empty ones do not."""
        gone: dict[str, list[str]] = {}
        for path in sorted(self.touched):
            if self.tree.lstat(path) is None and (was := _content_of(self.base, path)):
                gone.setdefault(was, []).append(path)
        pairs = {}
        for path in sorted(self.touched) if gone else ():
            came = _content_of(self.tree, path) if self.base.lstat(path) is None else None
            if came and gone.get(came):
                pairs[path] = gone[came].pop(0)
        return pairs

    def told(self, untouched: BranchChange, path: str) -> BranchChange:
        """Returns what the branch did to the path."""
        if path not in self.touched:
            return untouched
        before, after = _bytes(self.base, path), _bytes(self.tree, path)
        found = self.tree.lstat(path)
        if found is None:
            diff = _diff(before, b"", path)
            return replace(untouched, operation="deleted", unified_diff_vs_parent=diff)
        text = None if after is None else text_of(after)
        is_file = stat.S_ISREG(found.st_mode)
        what = _identity(self.tree, path)
        diff = _diff(before, after, path)
        if after is None and is_file:
            diff = f"[too big to be compared · {found.st_size} bytes · {what}]\n"
        return replace(
            untouched,
            operation="created" if self.base.lstat(path) is None else "modified",
            new_content=text,
            unified_diff_vs_parent=diff,
            size_bytes=found.st_size,
            is_binary=is_file and text is None,
            identity=what,
            renamed_from=self._renamed.get(path),
        )


def _path_diff(
    path: str, branches: Sequence[BranchRuntime], sides: Mapping[str, _Side]
) -> PathDiff:
    changes = {}
    for branch in branches:
        change = BranchChange(
            branch_id=branch.id, branch_label=branch.spec.label, operation="untouched"
        )
        side = sides.get(branch.id)
        changes[branch.id] = change if side is None else side.told(change, path)
    base = next((side.base for side in sides.values()), None)
    before = None if base is None else _bytes(base, path)
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


def _diff(before: bytes | None, after: bytes | None, path: str) -> str | None:
    texts = [None if data is None else text_of(data) for data in (before or b"", after)]
    if texts[0] is None or texts[1] is None:
        return None if after is None else f"{binary_label(after)}\n"
    return unified(texts[0], texts[1], path)


def _bytes(tree: Tree, path: str) -> bytes | None:
    """A file's content, or a link's target; None of what is neither, not there, or too big."""
    found = tree.lstat(path)
    try:
        if found is not None and stat.S_ISLNK(found.st_mode):
            return tree.readlink(path).encode(errors="surrogateescape")
        if found is not None and stat.S_ISREG(found.st_mode):
            return read_whole(tree, path, most=TEXT_BYTES_MAX)
    except OSError:
        pass  # it went meanwhile, is too big, or may not be read: told by its identity alone
    return None


def _identity(tree: Tree, path: str) -> str:
    try:
        return identity(tree, path)
    except OSError as error:
        return f"unreadable {error.strerror}"


def _content_of(tree: Tree, path: str) -> str | None:
    """The digest of a file that is not empty."""
    found = tree.lstat(path)
    if found is None or not stat.S_ISREG(found.st_mode) or not found.st_size:
        return None
    return _identity(tree, path).rpartition(" ")[2]


def _normal(path: str) -> str:
    return str(PurePosixPath(path))
