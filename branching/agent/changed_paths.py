"""Which paths a list of changes concerns, one by one: a moved directory stands for all in it."""

from __future__ import annotations

import stat
from collections.abc import Iterable

from branching.fs import Change
from branching.fs.confined_dir import ConfinedDir


def touched(changes: Iterable[Change], before: ConfinedDir, after: ConfinedDir) -> set[str]:
    """Returns every path that is not as it was, the workspace itself left out.

    Costs the changes, and a look at each name below a directory that was moved or replaced.
    """
    paths: set[str] = set()
    for change in changes:
        paths.add(change.path)
        if change.origin is not None:
            paths.add(change.origin)
        if change.change in ("renamed", "type", "deleted"):
            paths |= _below(before, change.origin or change.path)
        if change.change in ("renamed", "type", "added"):
            paths |= _below(after, change.path)
    paths.discard(".")
    return paths


def _below(tree: ConfinedDir, path: str) -> set[str]:
    found = tree.lstat(path)
    if found is None or not stat.S_ISDIR(found.st_mode):
        return set()
    return {inside for inside, _ in tree.walk(path)}
