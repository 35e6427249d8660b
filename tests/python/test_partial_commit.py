"""A partial commit keeps the rest in the branch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Mounted
from support.command import branching

from branching import CommitError, Workspace
from branching.fs import Branch


def changed(workspace: Workspace, name: str = "work") -> Branch:
    branch = workspace.branch(name, on_success=None)
    with branch:
        for path in ("one", "two", "three"):
            (branch.path / path).write_text(name)
    return branch


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("@"))


def test_the_branch_goes_on_with_what_was_not_committed(workspace: Workspace) -> None:
    branch = changed(workspace)
    before = names(workspace.path)
    assert [change.path for change in branch.commit(only=["one"])] == ["one"]
    assert (branch.remaining, branch.is_open) == (2, True)
    assert names(workspace.path) == sorted([*before, "one"])
    assert [change.path for change in branch.diff()] == ["three", "two"]
    assert {(branch.path / path).read_text() for path in ("one", "two", "three")} == {"work"}
    (branch.path / "two").write_text("more")
    assert [change.path for change in branch.commit(exclude=["three"])] == ["two"]
    assert branch.remaining == 1
    assert [change.path for change in branch.commit()] == ["three"]
    assert (branch.remaining, branch.is_open) == (0, False)
    assert (workspace.path / "two").read_text() == "more"
    assert branch.commit() == []


def test_a_commit_that_leaves_nothing_closes_the_branch(workspace: Workspace) -> None:
    branch = changed(workspace)
    branch.commit(only=["one", "t*"])
    assert (branch.remaining, branch.is_open) == (0, False)
    assert workspace.branches() == []


def test_the_rest_can_be_dropped(workspace: Workspace) -> None:
    branch = changed(workspace)
    branch.commit(only=["one"], drop_rest=True)
    assert (branch.remaining, branch.is_open) == (0, False)
    assert workspace.branches() == []
    assert not (workspace.path / "two").exists()


def test_a_dry_run_says_how_much_would_remain(workspace: Workspace) -> None:
    branch = changed(workspace)
    assert [change.path for change in branch.commit(only=["one"], dry_run=True)] == ["one"]
    assert (branch.remaining, branch.is_open) == (2, True)
    assert not (workspace.path / "one").exists()
    branch.abort()


def test_a_clean_exit_leaves_the_rest_open_and_an_exception_drops_it(workspace: Workspace) -> None:
    with workspace.branch("work") as branch:
        (branch.path / "one").write_text("x")
        (branch.path / "two").write_text("x")
        branch.commit(only=["one"])
    assert not (workspace.path / "two").exists()
    workspace.reopen("work").abort()
    with pytest.raises(RuntimeError), workspace.branch("work") as branch:
        (branch.path / "three").write_text("x")
        (branch.path / "two").write_text("x")
        branch.commit(only=["three"])
        raise RuntimeError
    assert workspace.branches() == []
    assert (workspace.path / "three").exists()


def test_the_rest_outlives_a_program_that_is_killed(real: Mounted) -> None:
    script = f"""
import os, signal
from branching import Workspace
with Workspace({str(real.root)!r}).branch("work") as branch:
    (branch.path / "one").write_text("x")
    (branch.path / "two").write_text("x")
    branch.commit(only=["one"])
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    with Workspace(real.root) as workspace:
        assert workspace.dropped == []
        workspace.reopen("work").commit()
    assert (real.root / "two").exists()


def test_an_older_file_system_that_would_drop_the_rest_is_not_asked_to(faked: Mounted) -> None:
    assert faked.fake is not None
    info = faked.fake._info()
    faked.fake._info = lambda: {**info, "features": ["disk_limit"]}  # type: ignore[method-assign]
    workspace = Workspace(faked.root)
    branch = changed(workspace)
    for options in ({"only": ["one"]}, {"exclude": ["one"]}, {"skip": True}):
        with pytest.raises(CommitError, match="would drop the paths that are not committed"):
            branch.commit(**options)
    assert branch.is_open
    branch.commit()
    workspace.close()


def test_with_the_overlay_driver_too(overlaid: Mounted) -> None:
    with Workspace(overlaid.root) as workspace:
        branch = changed(workspace)
        branch.commit(only=["one"])
        assert branch.remaining == 2
        assert {(branch.path / path).read_text() for path in ("one", "two")} == {"work"}
        done = branching(overlaid.root, "commit", "work")
        assert done.code == 0
        assert "stays open" not in done.err
    assert {"one", "three", "two"} <= {*names(overlaid.root)}
