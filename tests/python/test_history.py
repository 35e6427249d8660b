"""Undo, redo, history and prune: the Python face and the commands (their cases are BranchFS's)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import NAME_FROM, Mounted
from support.command import branching

from branching import CommitError, ConflictError, RecoveryError, Workspace


@pytest.fixture
def root(real: Mounted) -> Path:
    return real.root


def commit(workspace: Workspace, name: str, content: str = "x") -> None:
    with workspace.branch(name) as branch:
        (branch.path / name).write_text(content)


class TestWorkspace:
    def test_the_last_commit_is_taken_back_and_made_again(self, real_workspace: Workspace) -> None:
        space = real_workspace
        commit(space, "one")
        commit(space, "two")
        assert [(each.branch, each.undone) for each in space.history()] == [
            ("one", None),
            ("two", None),
        ]
        dry = space.undo(dry_run=True)
        assert (dry.commit.branch, (space.path / "two").exists()) == ("two", True)
        undone = space.undo()
        assert [(change.path, change.change) for change in undone.changes] == [("two", "deleted")]
        assert not (space.path / "two").exists()
        assert space.history()[-1].undone is not None
        assert space.redo().commit.branch == "two"
        assert (space.path / "two").exists()

    def test_what_others_changed_since_is_listed(
        self, real: Mounted, real_workspace: Workspace
    ) -> None:
        commit(real_workspace, "made")
        (real.base / "made").write_text("mine")
        with pytest.raises(ConflictError) as caught:
            real_workspace.undo()
        assert caught.value.paths == ("made",)
        assert (real.base / "made").read_text() == "mine"
        real_workspace.undo(force=True)
        assert not (real.base / "made").exists()

    def test_a_commit_that_was_applied_and_not_completed_says_so_until_it_is_completed(
        self, real: Mounted, real_workspace: Workspace
    ) -> None:
        history = real.base / ".branching/history"
        subprocess.run(["chattr", "+i", history], check=True)
        try:
            with (
                pytest.raises(RecoveryError, match=r"^the commit was applied") as caught,
                real_workspace.branch("made") as branch,
            ):
                (branch.path / "made").write_text("mine")
            assert "do not repeat it" in (caught.value.hint or "")
            assert (real.base / "made").read_text() == "mine"
            with pytest.raises(CommitError, match=r"nothing was undone: .*before an earlier one"):
                real_workspace.undo()
        finally:
            subprocess.run(["chattr", "-i", history], check=True)
        assert real_workspace.undo().commit.branch == "made"
        assert not (real.base / "made").exists()

    def test_nothing_to_undo_is_an_error(self, real_workspace: Workspace) -> None:
        for act in (real_workspace.undo, real_workspace.redo):
            with pytest.raises(CommitError, match="nothing was"):
                act()

    def test_pruned_commits_cannot_be_undone(self, real_workspace: Workspace) -> None:
        for name in ("a", "b", "c"):
            commit(real_workspace, name)
        removed, _ = real_workspace.prune(keep=1)
        assert removed == 2
        assert [each.branch for each in real_workspace.history()] == ["c"]
        real_workspace.undo()
        with pytest.raises(CommitError):
            real_workspace.undo()


class TestCommands:
    def test_undo_and_redo(self, root: Path) -> None:
        assert branching(root, "run", "-b", "mine", "touch", "made").code == 0
        done = branching(root, "undo", "--dry-run", "--json")
        assert (done.code, done.document["action"]) == (0, "none")
        assert (root / "made").exists()
        done = branching(root, "undo")
        assert (done.code, done.out) == (0, "branch: mine\naction: undone\n  D made\n")
        assert sorted(path.name for path in root.iterdir()) == [NAME_FROM]
        [listed] = branching(root, "history").out.splitlines()
        assert (listed.split()[3], listed.split()[-1]) == ("undone", "mine")
        done = branching(root, "redo", "--json")
        assert done.document["action"] == "redone"
        assert [change["path"] for change in done.document["changes"]] == ["made"]
        assert (root / "made").exists()

    def test_prune(self, root: Path) -> None:
        assert branching(root, "run", "touch", "made").code == 0
        assert len(branching(root, "history", "--json").document["commits"]) == 1
        done = branching(root, "prune", "--json")
        assert (done.code, done.document["removed"]) == (0, 1)
        assert branching(root, "history").out == ""

    @pytest.mark.parametrize("command", ["undo", "redo"])
    def test_nothing_to_take_back_is_our_failure(self, root: Path, command: str) -> None:
        done = branching(root, command)
        assert (done.code, done.out, "error: nothing was " in done.err) == (125, "", True)
