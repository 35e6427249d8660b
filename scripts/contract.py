#!/usr/bin/env python3
"""Keeps docs/contract.md and the tests in step: the tests of each row are those with its marker.

scripts/contract.py            writes the column of tests
scripts/contract.py --check    fails if the column is not current, or a test's name or docstring has a row's number
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "contract.md"
NUMBER = r"[A-Z]\d{1,2}|\d\.\d{1,2}"
ROW = re.compile(rf"^\| ({NUMBER}) \| (.*?) \| .*\|$", re.M)
CODE_IN_NAME = re.compile(r"(^|::)test_([a-z]\d+|rows?_\d+|must_\d+)(_|$)")
CODE_IN_DOCSTRING = re.compile(
    rf"^({NUMBER}|[A-Z]\d{{1,2}} to [A-Z]?\d+)(, ({NUMBER}))*($|[.:;] )|\b([Tt]able|[Rr]ow|[Mm]ust|[Ss]ection) \d+"
    r"|\b[Cc]ontract [A-Z0-9]|\((?:[A-Z]\d{1,2}(?:, | to |\)))+"
)


class Claim(NamedTuple):
    """A module, class or function with tests."""

    file: Path
    name: str
    docstring: str
    numbers: list[str]


def claims() -> Iterator[Claim]:
    """Yields everything in the tests that has a docstring or a marker."""
    for suite in ("python", "docker"):
        for file in sorted((ROOT / "tests" / suite).rglob("test_*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            yield Claim(file, "", ast.get_docstring(tree) or "", [])
            yield from within(tree, file, "")


def within(node: ast.Module | ast.ClassDef, file: Path, prefix: str) -> Iterator[Claim]:
    """Yields the classes and functions of a module or class."""
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            numbers = [
                str(ast.literal_eval(argument))
                for call in child.decorator_list
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.contract"
                for argument in call.args
            ]
            yield Claim(file, prefix + child.name, ast.get_docstring(child) or "", numbers)
            if isinstance(child, ast.ClassDef):
                yield from within(child, file, f"{prefix}{child.name}::")


def column(found: list[Claim], number: str) -> str:
    """Returns the last cell of a row."""
    suites = [ROOT / "tests" / suite for suite in ("python", "docker")]
    named = [
        f"`{claim.file.relative_to(suite)}::{claim.name}`"
        for suite in suites
        for claim in found
        if number in claim.numbers and claim.file.is_relative_to(suite)
    ]
    return "<br>".join(named)


def problems(found: list[Claim], rows: list[str], written: dict[str, str]) -> Iterator[str]:
    """Yields a line for each thing that is wrong."""
    for claim in found:
        at = f"{claim.file.relative_to(ROOT)}::{claim.name}"
        for number in claim.numbers:
            if number not in rows:
                yield f"{at}: docs/contract.md has no row {number}"
        if CODE_IN_NAME.search(claim.name):
            yield f"{at}: the name has a code; say the behaviour, and mark the row: @pytest.mark.contract"
        if code := CODE_IN_DOCSTRING.search(claim.docstring):
            yield f"{at}: the docstring refers to {code[0]!r}; say the behaviour"
    yield from (f"docs/contract.md: no test has the marker {row}" for row in rows if not written[row])


def main() -> int:
    found = list(claims())
    text = TABLE.read_text(encoding="utf-8")
    rows = [match[1] for match in ROW.finditer(text)]
    written = {row: column(found, row) for row in rows}
    current = ROW.sub(lambda row: f"| {row[1]} | {row[2]} | {written[row[1]]} |", text)
    wrong = list(problems(found, rows, written))
    if current != text and "--check" in sys.argv[1:]:
        wrong.append("docs/contract.md is not current. Hint: .venv/bin/python scripts/contract.py")
    elif current != text:
        TABLE.write_text(current, encoding="utf-8")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
