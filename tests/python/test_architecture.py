"""branchfs/docs/architecture.md names files, functions and uses that the source has."""

from __future__ import annotations

import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BRANCHFS = REPOSITORY / "branchfs"
DOCUMENT = BRANCHFS / "docs" / "architecture.md"
CORE = BRANCHFS / "crates" / "core"
SOURCES = [BRANCHFS / "src", CORE / "src"]

NAMED = re.compile(r"(?:[\w-]+/)*[\w-]+\.rs(?:::\w+)?")
"""A file of Rust, perhaps with an item in it."""

PROGRAM = {"main", "cli", "lib"}
"""What is not a module of the library."""

TESTS = re.compile(r"#\[cfg\(test\)\]\s*\n\s*mod tests \{.*", re.DOTALL)
"""Unit tests, which stand at the end of a file and may use any module."""

TEST_FILES = {
    "crash_tests.rs",
    "step_crash_tests.rs",
    "generated_tests.rs",
    "fault_tests.rs",
    "change_fault_tests.rs",
    "folding_tests.rs",
    "tests.rs",
    "faults.rs",
    "documents.rs",
    "document_tests.rs",
}


def named() -> list[str]:
    return sorted(set(NAMED.findall(DOCUMENT.read_text())))


def items(text: str) -> set[str]:
    """Returns the names of functions, types, constants, fields and variants that a file defines."""
    defined = re.findall(r"\b(?:fn|struct|enum|trait|const|static|type) (\w+)", text)
    fields = re.findall(r"^    (?:pub(?:\([a-z]+\))? )?([a-z]\w*): ", text, re.MULTILINE)
    variants = re.findall(r"^    ([A-Z]\w*)(?:,| \{|\()", text, re.MULTILINE)
    return {*defined, *fields, *variants}


def missing(name: str) -> str | None:
    """Returns what does not exist of `file` or `file::item`; None if all exists."""
    path, _, item = name.partition("::")
    roots = [BRANCHFS] if path.startswith(("crates/", "tests/")) else SOURCES
    files = [root / path for root in roots if (root / path).is_file()]
    if not files:
        return f"no file {path}"
    if item and not any(item in items(file.read_text()) for file in files):
        return f"no {item} in {path}"
    return None


def listed_uses() -> dict[str, set[str]]:
    """Returns the table of modules: which modules each may use."""
    section = DOCUMENT.read_text().split("\n## Modules\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `(\w+)` \|.*\|(.*)\|$", section, re.MULTILINE)
    return {module: set(re.findall(r"`(\w+)`", uses)) for module, uses in rows}


def uses_in_source() -> dict[str, set[str]]:
    """Returns which modules each module uses, without its tests."""
    uses: dict[str, set[str]] = {}
    files = {file: root for root in SOURCES for file in root.rglob("*.rs")}
    for file, root in files.items():
        module = file.relative_to(root).parts[0].removesuffix(".rs")
        if file.name in TEST_FILES or module in PROGRAM:
            continue
        code = re.sub(r"^\s*//.*$", "", TESTS.sub("", file.read_text()), flags=re.MULTILINE)
        used = re.findall(r"\b(?:crate|branchfs_core)::(\w+)", code)
        uses.setdefault(module, set()).update(used)
    return {module: used - {module} for module, used in uses.items()}


@pytest.mark.parametrize("name", named())
def test_every_file_and_function_of_the_architecture_exists(name: str) -> None:
    assert missing(name) is None


def test_functions_are_named_with_their_file() -> None:
    names = re.findall(r"`([^`\n]*::[^`\n]*)`", DOCUMENT.read_text())
    assert len(names) > 50
    assert [name for name in names if name != "file::name" and not NAMED.fullmatch(name)] == []


def test_a_missing_file_or_function_is_found() -> None:
    assert missing("workspace/commit.rs::commit") is None
    assert missing("workspace/gone.rs") == "no file workspace/gone.rs"
    assert missing("workspace/commit.rs::gone") == "no gone in workspace/commit.rs"


def test_the_table_of_modules_lists_every_module_and_every_use() -> None:
    listed, used = listed_uses(), uses_in_source()
    assert set(listed) == set(used)
    unlisted = {module: sorted(used[module] - listed[module]) for module in used}
    assert {module: others for module, others in unlisted.items() if others} == {}


def test_no_module_uses_one_that_uses_it() -> None:
    """TopologicalSorter raises CycleError, which names the modules of a circle."""
    assert set(TopologicalSorter(uses_in_source()).static_order()) >= set(uses_in_source())


def test_the_fuse_crate_does_not_use_branchfs() -> None:
    manifest = (BRANCHFS / "crates" / "fuse" / "Cargo.toml").read_text()
    dependencies = manifest.split("[dependencies]", 1)[1]
    assert re.search(r"^branchfs\b", dependencies, re.MULTILINE) is None


def test_the_core_crate_knows_no_fuse_no_sockets_and_no_command_line() -> None:
    manifest = (CORE / "Cargo.toml").read_text().split("[dependencies]", 1)[1]
    assert re.search(r"^(branchfs|branchfs-fuse|clap|anyhow)\b", manifest, re.MULTILINE) is None
    code = "".join(file.read_text() for file in (CORE / "src").rglob("*.rs"))
    assert re.search(r"UnixStream|UnixListener|rustix::net|/dev/fuse\"", code) is None


@pytest.mark.parametrize(
    "page", ["branchfs/docs/architecture.md", "docs/glossary.md", "CONTRIBUTING.md"]
)
def test_links_to_other_pages_lead_somewhere(page: str) -> None:
    path = REPOSITORY / page
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []
