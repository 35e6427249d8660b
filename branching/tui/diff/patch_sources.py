"""A kept patch side by side: the files that a branch changed which is gone."""

from __future__ import annotations

import re
from collections.abc import Sequence

from branching._caller import for_caller
from branching.fs import Change
from branching.tui.diff.line_diff import LINES_MAX, Comparison, Row
from branching.tui.formatting import letter

_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@")
_ESCAPE = re.compile(r"\\([0-7]{3}|.)")
_ESCAPES = {"n": "\n", "t": "\t"}


class PatchSource:
    """The files of a patch in the form that `git apply` takes. Only the changed lines are known."""

    left_name = "before"

    def __init__(self, branch: str, patch: bytes) -> None:
        self.right_name = branch
        text = patch.decode("utf-8", "replace")
        parts = re.split(r"^(?=diff --git )", text, flags=re.MULTILINE)
        files = [part.splitlines() for part in parts if part.startswith("diff --git ")]
        self._files = {_path(lines): lines for lines in files}
        self.paths = tuple(self._files)

    def title(self, path: str) -> str:
        """Returns the letter of the change and the path."""
        return f"{letter(self._change(path))} {path}"

    def changes(self) -> list[Change]:
        """Returns the changed paths, with the numbers of their changed lines."""
        found = []
        for path in self.paths:
            lines = self._files[path]
            of_hunks = lines[len(_head(lines)) :]
            counts = tuple(sum(line.startswith(sign) for line in of_hunks) for sign in "+-")
            is_binary = any(line.startswith(("GIT binary", "Binary files")) for line in lines)
            found.append(
                Change(
                    path=path,
                    change=self._change(path),
                    kind="file",
                    lines=None if is_binary else (counts[0], counts[1]),
                )
            )
        return found

    def _change(self, path: str) -> str:
        marks = (("new file", "added"), ("deleted file", "deleted"), ("rename ", "renamed"))
        head = _head(self._files[path])
        return next(
            (change for mark, change in marks if any(line.startswith(mark) for line in head)),
            "modified",
        )

    def compared(self, path: str) -> Comparison:
        """Returns the hunks of a file; a note where the patch has none."""
        lines = self._files[path]
        if len(lines) > LINES_MAX:
            return Comparison(
                path=path,
                note=for_caller(f"[{len(lines)} lines of patch: branching log --patch]"),
            )
        rows = tuple(_rows(lines[len(_head(lines)) :]))
        if rows:
            return Comparison(path=path, rows=rows)
        is_binary = any(line.startswith(("GIT binary", "Binary files")) for line in lines)
        note = "[binary]" if is_binary else "\n".join(lines[1:])
        return Comparison(path=path, note=note or "[no lines]")


def _head(lines: Sequence[str]) -> list[str]:
    """Returns the lines of a file before its first hunk."""
    ends = [number for number, line in enumerate(lines) if line.startswith(("@@ ", "GIT binary"))]
    return list(lines[: ends[0]] if ends else lines)


def _path(lines: Sequence[str]) -> str:
    """Returns the path of a file of the patch: after the change, or before a deletion."""
    for prefix, side in (("+++ ", "b/"), ("rename to ", ""), ("--- ", "a/")):
        for line in _head(lines):
            path = _unquoted(line.removeprefix(prefix))
            if line.startswith(prefix) and path != "/dev/null":
                return path.removeprefix(side)
    rest = lines[0].removeprefix("diff --git ")
    return _unquoted(rest[len(rest) // 2 + 1 :]).removeprefix("b/")  # a/NAME b/NAME, the same


def _unquoted(path: str) -> str:
    if not (path.startswith('"') and path.endswith('"')):
        return path.rstrip("\t")
    return (
        _ESCAPE.sub(
            lambda match: (
                chr(int(match[1], 8)) if match[1].isdecimal() else _ESCAPES.get(match[1], match[1])
            ),
            path[1:-1],
        )
        .encode("latin-1", "replace")
        .decode("utf-8", "replace")
    )


def _rows(lines: Sequence[str]) -> list[Row]:
    rows: list[Row] = []
    removed: list[tuple[int, str]] = []
    added: list[tuple[int, str]] = []
    left = right = 0

    def pair() -> None:
        for index in range(max(len(removed), len(added))):
            old = removed[index] if index < len(removed) else None
            new = added[index] if index < len(added) else None
            kind = "changed" if old and new else "removed" if old else "added"
            rows.append(
                Row(
                    old[1] if old else None,
                    new[1] if new else None,
                    kind,
                    old[0] if old else None,
                    new[0] if new else None,
                )
            )
        removed.clear()
        added.clear()

    for line in lines:
        sign, text = line[:1], line[1:]
        if hunk := _HUNK.match(line):
            pair()
            left, right = int(hunk[1]), int(hunk[2])
            rows.append(Row(f"@@ {left} | {right}", None, "hunk"))
        elif sign == "-":
            removed.append((left, text))
            left += 1
        elif sign == "+":
            added.append((right, text))
            right += 1
        elif sign == " ":
            pair()
            rows.append(Row(text, text, "same", left, right))
            left, right = left + 1, right + 1
    pair()
    return rows
