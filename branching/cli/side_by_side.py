"""A patch as rows of two columns, for the HTML report: the old file beside the new one.

Reads the patches that BranchFS writes: those of git, with lines that begin with `#` for changes
that a patch cannot represent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_END = "\\ No newline at end of file"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the old file beside a line of the new one."""

    kind: Literal["same", "changed", "gap"]
    """"gap": lines between two hunks are left out, and both sides are empty."""
    old: tuple[int, str] | None = None
    """Line number and text; None if the line has no counterpart."""
    new: tuple[int, str] | None = None


@dataclass(kw_only=True)
class FileDiff:
    """The changes of one file."""

    name: str
    notes: list[str] = field(default_factory=list)
    """Lines of the header, such as a new mode, and what a patch cannot represent."""
    rows: list[Row] = field(default_factory=list)
    added: int = 0
    deleted: int = 0


def file_diffs(patch: str) -> list[FileDiff]:
    """Returns the changes of a patch, file by file.

    Args:
        patch: The patch. A line that is not of a known form becomes a note of its file.
    """
    found: list[FileDiff] = []
    lines = patch.split("\n")
    if lines[-1] == "":
        lines.pop()
    place = 0
    while place < len(lines):
        line = lines[place]
        if line.startswith("diff --git "):
            found.append(FileDiff(name=_name(line)))
        elif hunk := _HUNK.match(line):
            if not found:
                found.append(FileDiff(name=""))
            place = _read_hunk(found[-1], lines, place + 1, hunk)
            continue
        elif not line.startswith(("--- ", "+++ ", "index ")):
            if not found or line.startswith("#"):
                found.append(FileDiff(name=""))
            found[-1].notes.append(line)
        place += 1
    return found


def _name(line: str) -> str:
    """Returns the new name in a line `diff --git a/NAME b/NAME`."""
    names = line.removeprefix("diff --git ")
    half = names[: len(names) // 2]
    if names == f"{half} b/{half.removeprefix('a/')}":
        return half.removeprefix("a/")
    return names  # it was renamed, or is quoted: both names say more than a guess


def _read_hunk(diff: FileDiff, lines: Sequence[str], place: int, hunk: re.Match[str]) -> int:
    """Adds the rows of a hunk. Returns the place of the first line after it."""
    old, new = int(hunk[1]), int(hunk[3])
    old_end, new_end = (
        start + (1 if count is None else int(count))
        for start, count in ((old, hunk[2]), (new, hunk[4]))
    )
    if diff.rows:
        diff.rows.append(Row(kind="gap"))
    deleted: list[tuple[int, str]] = []
    added: list[tuple[int, str]] = []
    while place < len(lines):
        mark, text = lines[place][:1], lines[place][1:]
        if lines[place] == _END:
            side = added or deleted
            if side:
                side[-1] = (side[-1][0], f"{side[-1][1]} (no newline at the end)")
        elif mark == "-" and old < old_end:
            if added:  # a deletion after an addition belongs to the next pair
                diff.rows += _paired(deleted, added)
                deleted, added = [], []
            deleted.append((old, text))
            old += 1
            diff.deleted += 1
        elif mark == "+" and new < new_end:
            added.append((new, text))
            new += 1
            diff.added += 1
        elif mark in (" ", "") and old < old_end and new < new_end:
            diff.rows += _paired(deleted, added)
            deleted, added = [], []
            diff.rows.append(Row(kind="same", old=(old, text), new=(new, text)))
            old, new = old + 1, new + 1
        else:
            break
        place += 1
    diff.rows += _paired(deleted, added)
    return place


def _paired(deleted: list[tuple[int, str]], added: list[tuple[int, str]]) -> Iterator[Row]:
    for number in range(max(len(deleted), len(added))):
        yield Row(
            kind="changed",
            old=deleted[number] if number < len(deleted) else None,
            new=added[number] if number < len(added) else None,
        )
