"""Plans a merge before any change is made.

For each path that the winner touched, three states are compared: at the fork (base), in the parent
now, and in the winner.

    the parent did not touch it                   take the winner's version
    both have the same version                    nothing to do
    otherwise                                     a conflict: on_conflict decides

The parent touched the paths that its own branch changed since the fork. If the fork is of main, it
also touched paths that others changed in the base directory. Such a file has a ctime after the fork
(ctime cannot be set back), or is not the file that the winner's branch replaced or deleted. It does
not count as touched if its content equals the content recorded while the branches were running. The
winner's version then keeps a mode that others have set, unless the winner changed the mode. If one
side removed a directory, it touched all paths in it, including those that the other side added.

Not detected: a file of the base that was deleted before the winner created one with the same name.
The winner's file is then a new file and is merged.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from branching.agent.branch_files import glob_test, read_whole
from branching.agent.copy_paths import TreeCopier
from branching.agent.diff.text import text_of, with_hunks
from branching.agent.errors import ForkStateError
from branching.agent.fingerprint import identity, is_same_content, mode_of
from branching.agent.types import FlushError, MergeOptions
from branching.errors import BranchingError
from branching.fs import Branch
from branching.fs.confined_dir import ConfinedDir


@dataclass(frozen=True, kw_only=True)
class Sides:
    """The three states, and the paths that each side touched."""

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
    originals: Mapping[str, str] = field(default_factory=dict)
    """What the base directory had at the fork, as far as it was recorded, by path."""

    @property
    def outside(self) -> ConfinedDir | None:
        """The base directory itself. A mounted view may not show recent external changes yet."""
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
    """The changes to apply to the parent. Paths are sorted; a directory precedes its content."""

    winners: tuple[str, ...]
    """Paths that become as they are in the winner, be that gone."""
    texts: dict[str, Text]
    """Files whose content is written."""
    modes: dict[str, int]
    """Modes of files among `winners` that others have set."""
    conflicts: tuple[str, ...]
    unselected: tuple[str, ...]
    """Paths that the winner changed and the options leave out."""
    is_whole: bool
    """All that the winner touched, and nothing that anybody else did: its branch can be committed
    as it is."""


def make_plan(sides: Sides, options: MergeOptions) -> Plan:
    """Decides each path. Changes nothing; costs the touched paths.

    ValueError for a hunk that is not there, BranchingError where git is needed and fails.
    """
    winners: list[str] = []
    texts: dict[str, bytes] = {}
    modes: dict[str, int] = {}
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
        raise ValueError(f"the winner has no changes of {unknown[0]} to merge: it has no hunks")
    for path in chosen:
        is_touched = _is_touched(path, sides)
        overlaps = overlaps or is_touched or _is_newer(path, sides)
        if path in options.hunks:
            texts[path] = _chosen_hunks(path, sides, options)
        if not is_touched:
            winners += [] if path in texts else [path]
            if (mode := _mode_of_others(path, sides)) is not None:
                modes[path] = mode
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
        modes=modes,
        conflicts=tuple(conflicts),
        unselected=tuple(sorted(sides.winner_touched.difference(chosen))),
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
    """Returns whether the parent touched the path, a directory above it, or a path below it."""
    if path in sides.parent_touched or (
        _is_newer(path, sides) and not _has_original_content(path, sides)
    ):
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


def _has_original_content(path: str, sides: Sides) -> bool:
    original = sides.originals.get(path)
    if original is None or sides.outside is None:
        return False
    return is_same_content(original, identity(sides.outside, path))


def _mode_of_others(path: str, sides: Sides) -> int | None:
    """Returns the mode that others gave a file since the fork and the winner did not."""
    original, winner = sides.originals.get(path, ""), sides.winner.lstat(path)
    if sides.outside is None or winner is None or not original.startswith("file "):
        return None
    found = sides.outside.lstat(path)
    was, is_now = mode_of(original), 0 if found is None else stat.S_IMODE(found.st_mode)
    is_theirs = found is not None and is_now != was == stat.S_IMODE(winner.st_mode)
    return is_now if is_theirs and stat.S_ISREG(winner.st_mode) else None


def _is_newer(path: str, sides: Sides) -> bool:
    return path in sides.drifted or is_newer(path, sides.directory, sides.forked_ns, sides.base)


def is_newer(path: str, directory: Path | None, forked_ns: int, base: ConfinedDir) -> bool:
    """Returns whether a file in the base directory was changed since the fork."""
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
        return True  # both created it; its content is compared separately
    parent = sides.parent
    if sides.outside is not None and path not in sides.parent_touched:
        parent = sides.outside
    return identity(sides.winner, path) == identity(parent, path)


def _chosen_hunks(path: str, sides: Sides, options: MergeOptions) -> bytes:
    before, after = _text(sides.base, path), _text(sides.winner, path)
    if after is None:
        raise ValueError(f"{path} is not text in the winner: it has no hunks")
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


MERGE_SECONDS_MAX = 60
_CONFLICTS_MAX = 127
"""`git merge-file` exits with the number of conflicts, of 127 and more with 127."""


def merge_texts(base: bytes, ours: bytes, theirs: bytes) -> bytes | None:
    """Returns the merge of both changes of `base`; None where they overlap.

    BranchingError where git is not there or fails.
    """
    with TemporaryDirectory(prefix="branching-merge-") as made:
        names = {"ours": ours, "base": base, "theirs": theirs}
        for name, content in names.items():
            Path(made, name).write_bytes(content)
        try:
            done = subprocess.run(
                ["git", "merge-file", "--stdout", *names],
                cwd=made,
                capture_output=True,
                timeout=MERGE_SECONDS_MAX,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BranchingError(
                f"texts cannot be merged: {error}",
                hint='install git, or choose another on_conflict: "keep", "theirs", "fail"',
            ) from error
    if done.returncode == 0:
        return done.stdout
    if 0 < done.returncode <= _CONFLICTS_MAX and done.stdout:
        return None
    raise BranchingError(f"git merge-file failed: {done.stderr.decode(errors='replace').strip()}")


def fill(stage: Branch, winner: Branch, plan: Plan) -> list[FlushError]:
    """Does what the plan says in `stage`; returns what could not be done, path by path."""
    errors: dict[str, FlushError] = {}
    frozen = winner.branch(f"{winner.name}.frozen", None, None).__enter__()
    try:
        copied = TreeCopier(frozen.path, stage.path)
        steps: list[tuple[str, Callable[[], None]]] = []
        # What is in a directory goes before the directory, and comes after it.
        steps += [(path, partial(copied.clear, path)) for path in reversed(plan.winners)]
        steps += [(path, partial(copied.make, path)) for path in plan.winners]
        steps += [
            (path, partial(_write, stage.path / path, text)) for path, text in plan.texts.items()
        ]
        steps += [
            (path, partial((stage.path / path).chmod, mode)) for path, mode in plan.modes.items()
        ]
        for path, step in steps:
            try:
                step()
            except OSError as error:
                reason = error.strerror or str(error)
                errors[path] = FlushError(path=path, op="write", message=reason)
    finally:
        frozen.abort()
    return list(errors.values())


def _write(path: Path, text: Text) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A new file: one that may not be written to is replaced all the same.
    path.unlink(missing_ok=True)
    path.write_bytes(text.content)
    os.chown(path, text.uid, text.gid)
    path.chmod(text.mode)
