"""The effect of a commit on concurrent branches, in the library and the command.

BranchFS's tests check the rules. These check the errors, exit codes and messages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import NAME_FROM
from support.branchfs import find_program, mounted
from support.command import branching

from branching import BestOfN, ConflictError, Speculate, SpeculationOutcome, Workspace


@pytest.fixture
def base(place: Path) -> Path:
    path = place / "base"
    path.mkdir()
    (path / NAME_FROM).write_text("seed\n")
    return path


@pytest.fixture(params=["snapshot", "serializable"])
def disjoint(request: pytest.FixtureRequest, base: Path) -> Iterator[Workspace]:
    """A workspace on which siblings live on."""
    with Workspace.mount(base, policy=request.param, branchfs_bin=find_program()) as workspace:
        yield workspace
        assert workspace.branches() == []


@pytest.fixture
def first_winner(base: Path) -> Iterator[Workspace]:
    """With the driver that serves the other policies too, commit by commit."""
    with Workspace.mount(base, driver="fuse", branchfs_bin=find_program()) as workspace:
        yield workspace
        assert workspace.branches() == []


def at_once(
    workspace: Workspace, *names: str
) -> tuple[list[SpeculationOutcome], list[ConflictError]]:
    """Calls a pattern for each name; all have forked before the first may commit."""
    all_forked = threading.Barrier(len(names), timeout=60)
    outcomes: list[SpeculationOutcome] = []
    conflicts: list[ConflictError] = []

    def writes(name: str) -> Callable[[Path], bool]:
        def candidate(path: Path) -> bool:
            (path / name).write_text(threading.current_thread().name)
            all_forked.wait()
            return True

        return candidate

    def call(name: str) -> None:
        try:
            outcomes.append(Speculate([writes(name)])(workspace))
        except ConflictError as conflict:
            conflicts.append(conflict)

    threads = [threading.Thread(target=call, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes, conflicts


class TestTwoPatternsAtOnce:
    """Two concurrent patterns on one workspace follow the policy."""

    def test_the_first_winner_makes_the_other_stale(self, first_winner: Workspace) -> None:
        outcomes, conflicts = at_once(first_winner, "a", "b")
        assert [outcome.committed for outcome in outcomes] == [True]
        assert len(conflicts) == 1

    def test_both_commit_where_they_wrote_different_paths(self, disjoint: Workspace) -> None:
        outcomes, conflicts = at_once(disjoint, "a", "b", "c")
        assert [outcome.committed for outcome in outcomes] == [True] * 3
        assert conflicts == []
        assert {(disjoint.path / name).exists() for name in "abc"} == {True}

    def test_one_of_two_commits_the_same_path(self, disjoint: Workspace) -> None:
        """The paths are named, and the loser's work is kept."""
        outcomes, conflicts = at_once(disjoint, "same", "same")
        assert [outcome.committed for outcome in outcomes] == [True]
        [conflict] = conflicts
        assert conflict.paths == ("same",)
        [kept] = disjoint.branches()
        assert kept.name in (conflict.hint or "")
        disjoint.reopen(kept.name).abort()


def test_the_losers_of_a_race_go_under_every_policy(disjoint: Workspace) -> None:
    def candidate(path: Path, attempt: int) -> tuple[bool, float]:
        (path / f"by-{attempt}").write_text("x")
        return True, float(attempt)

    assert BestOfN(candidate, 4)(disjoint).committed
    assert [path.name for path in disjoint.path.glob("by-*")] == ["by-3"]


class TestCommit:
    def test_another_policy_than_the_mounts(self, first_winner: Workspace) -> None:
        with first_winner.branch("a") as a, first_winner.branch("b") as b:
            (a.path / "a").write_text("x")
            (b.path / "b").write_text("x")
            a.commit(policy="snapshot")
            b.commit(policy="snapshot")
        assert {(first_winner.path / name).exists() for name in "ab"} == {True}

    def test_a_dry_run_prints_the_plan_and_does_nothing(self, first_winner: Workspace) -> None:
        with first_winner.branch("a") as branch:
            (branch.path / "made").write_text("x")
            assert [change.path for change in branch.commit(dry_run=True)] == ["made"]
            assert branch.is_open
            assert not (first_winner.path / "made").exists()
        assert (first_winner.path / "made").exists()

    def test_a_part_of_a_branch(self, first_winner: Workspace) -> None:
        with first_winner.branch("a") as branch:
            for name in ("one", "two", "three"):
                (branch.path / name).write_text("x")
            changes = branch.commit(only=["t*"], exclude=["three"])
            assert branch.remaining == 2
        assert [change.path for change in changes] == ["two"]
        assert sorted(path.name for path in first_winner.path.iterdir()) == [NAME_FROM, "two"]
        first_winner.reopen("a").commit()
        made = {NAME_FROM, "one", "three", "two"}
        assert {path.name for path in first_winner.path.iterdir()} == made

    def test_the_command_lists_the_conflict_and_takes_a_side(self, base: Path) -> None:
        with mounted(base, base.parent / "mount") as root:
            for side in ("force", "skip"):
                words = ["-b", "mine", "--on-success", "keep", "--", "sh", "-c"]
                script = f"echo mine >> {NAME_FROM}; echo x > made-{side}"
                assert branching(root, "run", *words, script).code == 0
                (base / NAME_FROM).write_text(f"theirs {side}\n")
                done = branching(root, "commit", "mine")
                assert done.code == 125
                assert f"\n  {NAME_FROM}\n" in done.err
                done = branching(root, "commit", "--dry-run", f"--{side}", "mine")
                assert (done.code, "✓ would commit " in done.err) == (0, True)
                done = branching(root, "commit", f"--{side}", "mine")
                assert done.code == 0
                assert ("1 changed path was not committed" in done.err) == (side == "skip")
                assert (base / f"made-{side}").exists()
                found = (base / NAME_FROM).read_text()
                assert ("mine" in found) == (side == "force"), found
            # What was skipped is still there, and still a conflict.
            assert branching(root, "diff", "mine").out == f"M {NAME_FROM}\n"
            assert branching(root, "commit", "mine").code == 125
            assert branching(root, "commit", "--skip", "--drop-rest", "mine").code == 0
            assert branching(root, "ls").out.count("mine") == 0

    def test_the_command_takes_a_part(self, base: Path) -> None:
        with mounted(base, base.parent / "mount") as root:
            words = ["--select", "a*", "-c", "touch a1 a2 b"]
            done = branching(root, "speculate", "--json", *words)
            assert [change["path"] for change in done.document["changes"]] == ["a1", "a2"]
            assert sorted(path.name for path in root.iterdir()) == ["a1", "a2", NAME_FROM]
            (kept,) = done.document["kept"]
            assert done.document["remaining"] == 1
            assert branching(root, "diff", kept).out == "A b\n"
            assert branching(root, "commit", kept).code == 0
            assert (root / "b").exists()
            done = branching(root, "speculate", "--select", "a*", "-c", "touch a3 c")
            assert "stays open: 1 changed path was not committed; see branching diff" in done.err
            assert not (root / "c").exists()

    def test_a_run_keeps_unselected_changes_or_drops_them_with_drop_rest(self, base: Path) -> None:
        with mounted(base, base.parent / "mount") as root:
            script = ["--select", "a*", "--", "sh", "-c", "touch $0-a a-$0; mkdir $0-d"]
            done = branching(root, "run", "-b", "work", *script, "1")
            assert (done.code, done.out) == (0, "")
            said = "branch work stays open: 2 changed paths were not committed; see branching diff"
            assert said in done.err
            assert branching(root, "commit", "work", "--json").document["remaining"] == 0
            assert (root / "1-a").exists()
            done = branching(root, "run", "-b", "work", "--json", "--drop-rest", *script, "2")
            assert done.document["remaining"] == 0
            assert (root / "a-2").exists()
            assert not (root / "2-a").exists()
            with Workspace(root) as space:
                assert space.branches() == []
            words = ["run", "-b", "work", "--setup", "touch prepared", *script, "3"]
            assert "3 changed paths were not committed" in branching(root, *words).err
            assert branching(root, "abort", "work").code == 0


@pytest.mark.parametrize("how", ["option", "environment"])
def test_a_command_mounts_with_the_policy_that_was_asked_for(base: Path, how: str) -> None:
    """Branches that wrote other paths than the first winner can be committed."""
    options = ("--policy", "snapshot") if how == "option" else ()
    environment = {} if how == "option" else {"BRANCHFS_POLICY": "snapshot"}
    keep = ("run", "--on-success", "keep", "-b")
    for name in ("a", "b"):
        done = branching(base, *options, *keep, name, "--", "touch", name, **environment)
        assert done.code == 0, done.err
    for name in ("a", "b"):
        done = branching(base, *options, "commit", name, **environment)
        assert done.code == 0, done.err
    assert {"a", "b"} <= {path.name for path in base.iterdir()}


def test_a_command_mounts_with_the_driver_that_was_asked_for(base: Path) -> None:
    done = branching(base, "--driver", "fuse", "status", "--json")
    assert done.document["fstype"] == "branchfs"


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--policy", "snapshot"), "policy snapshot (it has first-winner)"),
        (("--driver", "overlay"), "driver overlay (it has fuse)"),
    ],
)
def test_a_mount_with_another_policy_or_driver_is_not_taken_silently(
    first_winner: Workspace, base: Path, options: tuple[str, ...], wanted: str
) -> None:
    for words in ((), ("-w", str(base))):
        at = base if not words else base.parent
        done = branching(at, *options, "run", *words, "--", "touch", "made")
        assert done.code == 125
        assert f"is mounted already, not with the {wanted}" in done.err
        assert "Hint: wait for the other commands on it, or unmount it" in done.err
    assert not (base / "made").exists()
