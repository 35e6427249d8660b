"""Two sides of a file, line beside line, in hunks."""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass

SIDE_BYTES_MAX = 256 << 10
"""Of a bigger file only sizes and digests are compared: nobody reads it line by line."""
LINES_MAX = 5000
CONTEXT_LINES = 3
_BINARY_BYTES = 8192
"""A NUL among so many first bytes makes a file binary, as for git."""


@dataclass(frozen=True)
class Row:
    """One line of the comparison."""

    left: str | None
    right: str | None
    kind: str
    """"same", "changed", "removed", "added", or "hunk", whose left says where it is."""
    left_number: int | None = None
    right_number: int | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A file on both sides."""

    path: str
    rows: tuple[Row, ...] = ()
    note: str = ""
    """Why there are no rows."""

    @property
    def hunks(self) -> list[int]:
        """The rows at which hunks begin."""
        return [number for number, row in enumerate(self.rows) if row.kind == "hunk"]


def compare(path: str, left: bytes | str | None, right: bytes | str | None) -> Comparison:
    """Compares two contents. None is a file that is not there, a string says why it is not read."""
    if isinstance(left, str) or isinstance(right, str):
        return Comparison(path=path, note="\n".join(t for t in (left, right) if isinstance(t, str)))
    if left is None and right is None:
        return Comparison(path=path, note="[on neither side]")
    if left == right:
        return Comparison(path=path, note="[the same content on both sides]")
    sides = [left or b"", right or b""]
    if any(b"\0" in side[:_BINARY_BYTES] for side in sides):
        return Comparison(path=path, note=f"[binary]\n{_facts(left)}\n{_facts(right)}")
    texts = [side.decode("utf-8", "replace").splitlines() for side in sides]
    if max(map(len, texts)) > LINES_MAX:
        return Comparison(path=path, note=f"[long]\n{_facts(left)}\n{_facts(right)}")
    rows = tuple(_rows(*texts))
    return Comparison(
        path=path, rows=rows, note="" if rows else f"[no lines]\n{_facts(left)}\n{_facts(right)}"
    )


def _rows(left: list[str], right: list[str]) -> list[Row]:
    rows: list[Row] = []
    matcher = difflib.SequenceMatcher(None, left, right, autojunk=len(left) + len(right) > 2000)
    for group in matcher.get_grouped_opcodes(CONTEXT_LINES):
        a, b = group[0][1], group[0][3]
        rows.append(Row(f"@@ {a + 1} | {b + 1}", None, "hunk"))
        for tag, left_from, left_to, right_from, right_to in group:
            length = max(left_to - left_from, right_to - right_from)
            for step in range(length):
                i, j = left_from + step, right_from + step
                has_left, has_right = i < left_to, j < right_to
                kind = "same" if tag == "equal" else "changed"
                if not (has_left and has_right):
                    kind = "removed" if has_left else "added"
                rows.append(
                    Row(
                        left[i] if has_left else None,
                        right[j] if has_right else None,
                        kind,
                        i + 1 if has_left else None,
                        j + 1 if has_right else None,
                    )
                )
    return rows


def _facts(content: bytes | None) -> str:
    if content is None:
        return "absent"
    return f"{len(content)} bytes · sha256:{hashlib.sha256(content).hexdigest()[:12]}"
