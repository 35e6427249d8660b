"""What a merge is to do, found out before anything is done.

For each path that the winner touched three states are compared: at the fork (base), in the parent
now, in the winner.

    the parent did not touch it                   the winner's lands
    both made the same of it                      nothing to do
    else                                          a conflict: on_conflict decides

The parent touched what its own branch changed since the fork, and of main also what others changed
in the base directory: such a file is newer than the fork (ctime, which cannot be set back), or is
not what the winner's branch has replaced (which knows, also of what is deleted). A directory that
one side removed is touched with all in it, also with what the other side put there.

Not seen: a file of the base that somebody deleted before the winner made one of the same name. It
is a new file then, and lands.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from branching.agent.branch_files import glob_test, read_whole
from branching.agent.diff.text import text_of, with_hunks
from branching.agent.errors import ForkStateError
from branching.agent.fingerprint import identity
from branching.agent.merge.three_way import merge_texts
from branching.agent.types import FlushError, MergeOptions
from branching.fs.confined_dir import ConfinedDir


@dataclass(frozen=True, kw_only=True)
class Sides:
    """The three states, and who touched what."""

    base: ConfinedDir
    parent: ConfinedDir
    winner: ConfinedDir
    winner_touched: frozenset[str]
    parent_touched: frozenset[str]
    drifted: frozenset[str]
    """What others did to files that the winner has replaced: it knows what they were."""
    directory: Path | None
    """Of main: the base directory, in which others may have changed files behind our back."""
    forked_ns: int

    @property
    def outside(self) -> ConfinedDir | None:
        """The base directory, by itself: a view of it may not have noticed yet what others made."""
        return None if self.directory is None else self.base.beside(self.directory)


@dataclass(frozen=True, kw_only=True)
class Text:
    """A file whose content is neither side's."""

    content: bytes
    mode: int
    uid: int
    gid: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be done to the parent. Paths are sorted, a directory before what is in it."""

    winners: tuple[str, ...]
    """Paths that become as they are in the winner, be that gone."""
    texts: dict[str, Text]
    """Files that are written anew."""
    conflicts: tuple[str, ...]
    is_whole: bool
    """All that the winner touched, and nothing that anybody else did: its branch can be committed
    as it is."""

    def without(self, errors: Sequence[FlushError]) -> Plan:
        """Returns the plan without the paths that cannot be done."""
        out = {error.path for error in errors}
        return replace(
            self,
            winners=tuple(path for path in self.winners if path not in out),
            texts={path: text for path, text in self.texts.items() if path not in out},
        )


def make_plan(sides: Sides, options: MergeOptions) -> Plan:
    """Decides each path. Changes nothing; costs the touched paths.

    ValueError for a hunk that is not there, BranchingError where git is needed and fails.
    """
    winners: list[str] = []
    texts: dict[str, bytes] = {}
    conflicts: list[str] = []
    overlaps = False
    chosen = [path for path in sorted(sides.winner_touched) if _is_chosen(path, options)]
    if sides.winner_touched and not chosen:
        raise ForkStateError(
            f"none of the {len(sides.winner_touched)} paths that the winner changed is selected: "
            "nothing was merged",
            hint="select others; the branch still has all of its changes",
        )
    if unknown := sorted({*options.hunks}.difference(chosen)):
        raise ValueError(f"the winner has no change of {unknown[0]} that is to be merged: no hunks")
    for path in chosen:
        is_touched = _is_touched(path, sides)
        overlaps = overlaps or is_touched
        if path in options.hunks:
            texts[path] = _chosen_hunks(path, sides, options)
        if not is_touched:
            winners += [] if path in texts else [path]
        elif _same(path, sides) and path not in texts:
            continue
        elif (merged := _merged(path, sides, options, texts.pop(path, None))) is not None:
            texts[path] = merged
        else:
            conflicts.append(path)
            if options.on_conflict == "theirs":
                winners.append(path)
    return Plan(
        winners=tuple(winners),
        texts={path: _as_file(path, content, sides) for path, content in texts.items()},
        conflicts=tuple(conflicts),
        is_whole=not overlaps and not texts and len(chosen) == len(sides.winner_touched),
    )


def _is_chosen(path: str, options: MergeOptions) -> bool:
    return (not options.only or _is_under(path, options.only)) and not _is_under(
        path, options.exclude
    )


def _is_under(path: str, patterns: Iterable[str]) -> bool:
    """Tells whether a pattern matches the path or a directory above it, as `--select` does.

    A pattern without a slash is a name in any directory, one with a slash a path from the root.
    A name that looks like a pattern also stands for itself.
    """
    whole = PurePosixPath(path)
    names = [str(part) for part in (whole, *whole.parents) if str(part) != "."]
    for pattern in patterns:
        trimmed = pattern.rstrip("/")
        if trimmed.removeprefix("/") in names:
            return True
        anchored = trimmed.removeprefix("/") if "/" in trimmed else f"**/{trimmed}"
        if any(map(glob_test(anchored), names)):
            return True
    return False


def _is_touched(path: str, sides: Sides) -> bool:
    """Tells whether somebody else touched the path, or what it needs, or what goes with it."""
    if path in sides.parent_touched or _is_newer(path, sides):
        return True
    winner = sides.winner.lstat(path)
    if winner is not None:
        # It needs its directories, which the parent may have removed.
        return any(
            str(above) in sides.parent_touched and not _is_directory(sides.parent, str(above))
            for above in PurePosixPath(path).parents
            if str(above) != "."
        )
    if not _is_directory(sides.parent, path):
        return False
    # What the parent put into a directory that the winner removed would go with it.
    prefix = f"{path}/"
    return any(
        other.startswith(prefix) and sides.parent.lstat(other) is not None
        for other in sides.parent_touched
    )


def _is_newer(path: str, sides: Sides) -> bool:
    return path in sides.drifted or is_newer(path, sides.directory, sides.forked_ns, sides.base)


def is_newer(path: str, directory: Path | None, forked_ns: int, base: ConfinedDir) -> bool:
    """Tells whether somebody changed a file in the base directory since the fork."""
    if directory is None:
        return False
    try:
        found = (directory / path).lstat()
    except (FileNotFoundError, NotADirectoryError):
        was = base.lstat(path)
        return was is not None and not stat.S_ISDIR(was.st_mode)
    # A directory is newer as soon as a name comes or goes in it: that is those names' matter.
    return not stat.S_ISDIR(found.st_mode) and found.st_ctime_ns > forked_ns


def _is_directory(tree: ConfinedDir, path: str) -> bool:
    found = tree.lstat(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def _same(path: str, sides: Sides) -> bool:
    if _is_directory(sides.winner, path) and _is_directory(sides.parent, path):
        return True  # both made it: what is in it is compared by itself
    parent = sides.parent
    if sides.outside is not None and path not in sides.parent_touched:
        parent = sides.outside
    return identity(sides.winner, path) == identity(parent, path)


def _chosen_hunks(path: str, sides: Sides, options: MergeOptions) -> bytes:
    before, after = _text(sides.base, path), _text(sides.winner, path)
    if after is None:
        raise ValueError(f"{path} is no text in the winner: it has no hunks")
    return with_hunks(before or "", after, options.hunks[path]).encode()


def _merged(path: str, sides: Sides, options: MergeOptions, wanted: bytes | None) -> bytes | None:
    """Returns the three-way merge of a text; None where that is not asked for, or cannot be."""
    if options.on_conflict != "merge3" or _is_newer(path, sides):
        return None  # what the base directory had at the fork is gone
    base, parent, winner = (_text(tree, path) for tree in (sides.base, sides.parent, sides.winner))
    if base is None or parent is None or winner is None:
        return None
    theirs = winner.encode() if wanted is None else wanted
    return merge_texts(base.encode(), parent.encode(), theirs)


def _as_file(path: str, content: bytes, sides: Sides) -> Text:
    """The mode is merged too: the winner's if the winner changed it, else the parent's."""
    base, parent, winner = (tree.lstat(path) for tree in (sides.base, sides.parent, sides.winner))
    found = parent or base
    if winner is not None and (base is None or winner.st_mode != base.st_mode):
        found = winner
    assert found is not None, "a text that is merged is there on one side at least"
    return Text(
        content=content, mode=stat.S_IMODE(found.st_mode), uid=found.st_uid, gid=found.st_gid
    )


def _text(tree: ConfinedDir, path: str) -> str | None:
    found = tree.lstat(path)
    if found is None or not stat.S_ISREG(found.st_mode):
        return None
    return text_of(read_whole(tree, path))
