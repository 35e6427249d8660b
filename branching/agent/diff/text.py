"""Text comparison: detection of text, bounded unified diffs, selectable hunks."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Sequence

from branching.agent.branch_files import BINARY_PROBE_BYTES

DIFF_LINES_MAX = 500
"""Of a longer diff the head and the tail are shown."""
TEXT_BYTES_MAX = 1 << 20
"""For bigger files only digests are compared, because the time of a diff grows quadratically."""


def text_of(data: bytes) -> str | None:
    """Returns it as text; None where it is binary: a NUL near the start, or no UTF-8."""
    if b"\0" in data[:BINARY_PROBE_BYTES]:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def binary_label(data: bytes) -> str:
    """`[binary · 12 bytes · sha256:0123456789ab]`"""
    return f"[binary · {len(data)} bytes · sha256:{hashlib.sha256(data).hexdigest()[:12]}]"


def unified(before: str, after: str, path: str) -> str:
    """Returns the unified diff of two texts, its middle left out if it is long."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    if len(before) + len(after) > TEXT_BYTES_MAX:
        return f"[{path} is too long to be compared: {len(old)} lines, now {len(new)}]\n"
    lines = [
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in difflib.unified_diff(old, new, f"a/{path}", f"b/{path}")
    ]
    if len(lines) > DIFF_LINES_MAX:
        head, tail = DIFF_LINES_MAX // 2, DIFF_LINES_MAX - DIFF_LINES_MAX // 2
        left_out = len(lines) - head - tail
        lines = [*lines[:head], f"[{left_out} lines truncated]\n", *lines[-tail:]]
    return "".join(lines)


def with_hunks(before: str, after: str, chosen: Sequence[int]) -> str:
    """Returns `before` with some of the hunks that lead to `after`, numbered from 0.

    Hunks are those of the unified diff. Raises ValueError for a number without a hunk.
    """
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    matcher = difflib.SequenceMatcher(None, old, new)
    groups = list(matcher.get_grouped_opcodes())
    if wrong := [number for number in chosen if not 0 <= number < len(groups)]:
        raise ValueError(f"there are {len(groups)} hunks, numbered from 0: there is no {wrong[0]}")
    result, done = [], 0
    for number in sorted(set(chosen)):
        for tag, start, end, new_start, new_end in groups[number]:
            if tag == "equal":
                continue
            result += old[done:start] + new[new_start:new_end]
            done = end
    return "".join(result + old[done:])
