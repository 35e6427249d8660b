"""Rebasing stale branches, and commands that work at the same time on one directory."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import Mounted
from support.command import branching

from branching import ConflictError, Workspace


def test_a_rebased_branch_commits_its_changes_on_top_of_the_winners(real: Mounted) -> None:
    workspace = Workspace(real.root)
    late = workspace.branch("late", on_success=None)
    with late:
        (late.path / "late").write_text("2")
        with workspace.branch("winner") as winner:
            (winner.path / "winner").write_text("1")
        assert late.is_stale()
        with pytest.raises(ConflictError):
            late.commit()
        assert late.rebase() == []
        assert not late.is_stale()
        assert (late.path / "winner").read_text() == "1"
        late.commit()
    assert (real.root / "late").read_text() == "2"
    assert (real.root / "winner").read_text() == "1"


def test_a_conflicting_rebase_lists_the_paths_and_force_decides(real: Mounted) -> None:
    workspace = Workspace(real.root)
    late = workspace.branch("late", on_success=None)
    with late:
        (late.path / "same").write_text("late")
        with workspace.branch("winner") as winner:
            (winner.path / "same").write_text("winner")
        for attempt in (late.rebase, lambda: late.commit(rebase=True)):
            with pytest.raises(ConflictError) as caught:
                attempt()
            assert caught.value.paths == ("same",)
            assert late.is_stale()
        assert late.rebase(force=True) == ["same"]
        late.commit()
    assert (real.root / "same").read_text() == "late"


def test_the_commands_rebase_and_commit_with_rebase(real: Mounted) -> None:
    with Workspace(real.root).branch("kept", on_success=None) as kept:
        (kept.path / "kept").write_text("2")
    with Workspace(real.root).branch("winner") as winner:
        (winner.path / "winner").write_text("1")
    refused = branching(real.root, "commit", "kept")
    assert refused.code == 125
    assert "--rebase" in refused.err
    done = branching(real.root, "rebase", "kept")
    assert (done.code, done.out, done.err) == (0, "", "✓ rebased branch kept\n")
    assert branching(real.root, "commit", "--rebase", "kept").code == 0
    assert (real.root / "kept").read_text() == "2"


def test_commands_that_work_at_the_same_time_on_other_paths_are_both_committed(
    real: Mounted,
) -> None:
    """The second begins before the first is committed, and goes on writing after that."""
    script = "echo 1 > $0; echo started; read line; cat seed.txt; echo 2 >> $0"
    command = [sys.executable, "-m", "branching", "run", "-q", "-w", str(real.root), "--"]
    slow = subprocess.Popen(
        [*command, "sh", "-c", script, "slow"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert slow.stdout is not None
    assert slow.stdout.readline() == "started\n"
    quick = branching(real.root, "run", "-q", "--", "sh", "-c", "echo quick > quick")
    assert quick.code == 0, quick
    _, said = slow.communicate("go on\n", timeout=60)
    assert slow.returncode == 0, said
    assert (real.root / "slow").read_text() == "1\n2\n"
    assert (real.root / "quick").read_text() == "quick\n"


def test_of_commands_that_change_the_same_path_the_second_is_a_conflict_and_is_kept(
    real: Mounted,
) -> None:
    script = "echo slow > same; echo started; read line"
    command = [sys.executable, "-m", "branching", "run", "-q", "-w", str(real.root), "-b", "slow"]
    slow = subprocess.Popen(
        [*command, "--", "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert slow.stdout is not None
    assert slow.stdout.readline() == "started\n"
    assert branching(real.root, "run", "-q", "--", "sh", "-c", "echo quick > same").code == 0
    _, said = slow.communicate("go on\n", timeout=60)
    assert slow.returncode == 125
    assert "same" in said
    assert (real.root / "same").read_text() == "quick\n"
    branch = Workspace(real.root).reopen("slow")
    assert (branch.path / "same").read_text() == "slow\n"
    branch.abort()


def test_a_commit_says_which_earlier_commit_it_pushes_out_of_the_history(real: Mounted) -> None:
    for number in range(10):
        with Workspace(real.root).branch(f"commit-{number}") as branch:
            (branch.path / "file").write_text(str(number))
    done = branching(real.root, "run", "-q", "--", "sh", "-c", "echo 10 > file")
    assert "the commit of 'commit-0' can no longer be undone" in done.err
    with Workspace(real.root).branch("kept", on_success=None) as kept:
        (kept.path / "file").write_text("11")
    for options, said in ((["--dry-run"], "could"), ([], "can")):
        done = branching(real.root, "commit", *options, "kept")
        assert f"the commit of 'commit-1' {said} no longer be undone" in done.err, done


def test_a_winner_that_changes_nothing_after_a_setup_is_committed_with_it(real: Mounted) -> None:
    done = branching(
        real.root, "speculate", "--setup", "echo x > prepared", "-c", "sleep 60", "-c", "true"
    )
    assert done.code == 0, done
    assert (real.root / "prepared").exists()
    assert Workspace(real.root).branches() == []


def test_a_commit_of_nothing_keeps_other_branches_and_the_history(real: Mounted) -> None:
    assert branching(real.root, "run", "-q", "--", "sh", "-c", "echo 1 > file").code == 0
    kept = branching(
        real.root, "run", "-b", "idea", "--on-success", "keep", "--", "sh", "-c", "echo 2 > idea"
    )
    assert kept.code == 0, kept
    before = branching(real.root, "history", "--json").document
    for _ in range(3):
        assert branching(real.root, "run", "-q", "--", "cat", "file").code == 0
    assert branching(real.root, "history", "--json").document == before
    assert branching(real.root, "commit", "idea").code == 0
    assert (real.root / "idea").read_text() == "2\n"
