"""scripts/release-notes prints a section of the change log, or says which version disagrees."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSIONS = {
    "branching/__init__.py": '__version__ = "{}"\n',
    "branching-docker/src/branching_docker/__init__.py": '__version__ = "{}"\n',
    "branchfs/Cargo.toml": '[package]\nversion = "{}"\n',
}
CHANGELOG = """# Changes

## Unreleased

- Not yet.

## 1.10.0 - 2026-02-01

### Fixed

- A fault.

## 1.1.0 - 2026-01-01

- The first.
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree whose three distributions have the version 1.10.0."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "release-notes", tmp_path / "scripts")
    for name, text in VERSIONS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format("1.10.0"))
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    return tmp_path


def notes(tree: Path, version: str) -> subprocess.CompletedProcess[str]:
    """Runs the script of the tree."""
    return subprocess.run(
        [tree / "scripts" / "release-notes", version],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_section_of_the_version_is_printed_without_its_heading(tree: Path) -> None:
    done = notes(tree, "1.10.0")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "### Fixed\n\n- A fault.\n"


@pytest.mark.parametrize("name", VERSIONS)
def test_a_distribution_of_another_version_is_named(tree: Path, name: str) -> None:
    (tree / name).write_text(VERSIONS[name].format("1.9.0"))
    done = notes(tree, "1.10.0")
    assert (done.returncode, done.stdout) == (1, "")
    expected = f"error: {name} has the version 1.9.0, not 1.10.0. Nothing was released.\n"
    assert done.stderr == expected


def test_a_version_without_a_dated_section_is_refused(tree: Path) -> None:
    (tree / "CHANGELOG.md").write_text(CHANGELOG.replace("1.10.0 - 2026-02-01", "1.10.0"))
    done = notes(tree, "1.10.0")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no section" in done.stderr


def test_the_sources_of_the_project_have_one_version() -> None:
    """Only the missing section may be wrong between releases."""
    version = (
        (ROOT / "branching" / "__init__.py").read_text().split('__version__ = "')[1].split('"')[0]
    )
    errors = notes(ROOT, version).stderr
    assert "has the version" not in errors
    assert "has no version" not in errors
