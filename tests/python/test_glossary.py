"""docs/glossary.md defines each term once, in order, and maps older names on disk."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TERMS, OLDER = (
    (REPOSITORY / "docs" / "glossary.md").read_text().split("\n## Older names on disk\n", 1)
)


def terms() -> list[tuple[str, str]]:
    return re.findall(r"^\| \*\*(.+)\*\* \| (.*) \|$", TERMS, re.MULTILINE)


def older_names() -> list[str]:
    cells = re.findall(r"^\| (`.*?) \|", OLDER, re.MULTILINE)
    return sorted({name for cell in cells for name in re.findall(r"`([^`]+)`", cell)})


def test_each_term_is_defined_once_in_alphabetical_order() -> None:
    names = [name.casefold() for name, _ in terms()]
    assert len(names) > 100
    assert names == sorted(set(names))
    assert [name for name, meaning in terms() if len(meaning) < len("a word.")] == []


@pytest.mark.parametrize("name", older_names())
def test_an_older_name_on_disk_is_still_in_the_source(name: str) -> None:
    roots = ("branchfs/src/**/*.rs", "branchfs/crates/**/*.rs", "branching/**/*.py")
    files = [file for pattern in roots for file in REPOSITORY.glob(pattern)]
    word = re.compile(rf"\b{re.escape(name)}\b")
    assert any(name in {file.name, file.stem} or word.search(file.read_text()) for file in files)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "branchfs/docs/architecture.md"])
def test_the_glossary_is_linked(page: str) -> None:
    path = REPOSITORY / page
    targets = re.findall(r"\]\(([^)#]*glossary\.md)", path.read_text())
    assert [(path.parent / target).resolve() for target in targets] != []
    assert all((path.parent / target).is_file() for target in targets)
