"""The published package BranchContext itself, on our mount.

Each version is in an environment of its own (scripts/setup makes them) without this library. It
finds the mount and controls it through control files, as it does with the published BranchFS.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.branchfs import find_program, mounted

from branching import Workspace

SCENARIOS = Path(__file__).parent / "published" / "scenarios.py"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
SECONDS_MAX = 90


def bin_of(version: str) -> Path:
    place = CACHE / "branching-tools" / f"published-{version}" / "bin"
    assert place.is_dir(), f"BranchContext {version} is not installed in {place}: run scripts/setup"
    return place


def run(*argv: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=SECONDS_MAX, cwd=cwd, check=False
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(params=["0.2.0", "0.3.0"])
def version(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def plain(scratch: Path) -> Iterator[Path]:
    """A directory without a space in its path: the package does not find a mount with one."""
    with tempfile.TemporaryDirectory(prefix="published-", dir=scratch) as path:
        yield Path(path)


@pytest.fixture
def root(plain: Path) -> Iterator[Path]:
    """A mount with control files; no branch may be left at the end."""
    base = plain / "base"
    base.mkdir()
    (base / "seed.txt").write_text("seed\n")
    # Without a history nothing may be left in the base.
    with mounted(base, plain / "mount", "--control-files", "--history", "0") as mountpoint:
        yield mountpoint
        with closing(Workspace(mountpoint)) as workspace:
            assert [branch.name for branch in workspace.branches()] == []
    assert sorted(path.name for path in base.glob(".branch*")) == []


@pytest.mark.slow
@pytest.mark.contract("8.1", "8.2", "8.3", "8.4")
@pytest.mark.parametrize(
    "scenario",
    [
        "commit_and_abort",
        "nested",
        "conflict",
        "kept",
        "speculate",
        "best_of_n",
        "reflexion",
        "tree_of_thoughts",
        "beam_search",
        "tournament",
        "cascaded",
        "process",
    ],
)
def test_the_published_package_works_on_our_mount(root: Path, version: str, scenario: str) -> None:
    run(bin_of(version) / "python", SCENARIOS, scenario, root)


@pytest.mark.contract("8.1")
def test_the_published_command_works_on_our_mount(root: Path, version: str) -> None:
    program = bin_of(version) / "branching"
    told = run(program, "run", "--json", "--", "touch", "made", cwd=root)
    assert json.loads(told)["action"] == "committed"
    assert (root / "made").exists()
    told = run(program, "speculate", "--json", "-c", "false", "-c", "touch second", cwd=root)
    assert json.loads(told)["winner"] == 1
    assert (root / "second").exists()
    told = run(program, "status", "--json", cwd=root)
    assert json.loads(told)["fstype"] == "fuse.branchfs"


@pytest.mark.contract("8.5")
def test_the_published_package_mounts_and_unmounts_by_our_program(plain: Path) -> None:
    base = plain / "base"
    base.mkdir()
    run(bin_of("0.3.0") / "python", SCENARIOS, "its_own_mount", base, find_program())
    assert sorted(path.name for path in base.iterdir()) == ["new", "seed.txt"]
