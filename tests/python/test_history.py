"""Undo, redo, history and prune: the Python face and the commands (their cases are BranchFS's)."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import NAME_FROM, Mounted
from support.command import branching

from branching import CommitError, ConflictError, RecoveryError, Workspace
from branching.fs.checkpoints import Checkpoints


@pytest.fixture
def root(real: Mounted) -> Path:
    return real.root


def commit(workspace: Workspace, name: str, content: str = "x") -> None:
    with workspace.branch(name) as branch:
        (branch.path / name).write_text(content)


class TestWorkspace:
    def test_the_last_commit_is_undone_and_redone(self, real_workspace: Workspace) -> None:
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

    def test_later_changes_by_others_are_listed(
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
        assert (done.code, done.out) == (0, "  D made\n")
        assert done.err == "✓ undid the commit of mine · 1 path (-1) · redo: branching redo\n"
        assert sorted(path.name for path in root.iterdir()) == [NAME_FROM]
        [listed] = branching(root, "history").out.splitlines()
        assert (listed.split()[2], listed.split()[-1]) == ("undone", "mine")
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

    def test_a_commit_is_shown_and_undone_by_its_id(self, root: Path) -> None:
        for name in ("one", "two"):
            done = branching(root, "run", "--json", "-b", name, "--", "touch", name)
            assert done.document["commit"] > 0
        first, second = branching(root, "history", "--json").document["commits"]
        assert second["id"] == done.document["commit"]
        shown = branching(root, "show", str(first["id"]))
        assert shown.code == 0
        assert [line.split()[0] for line in shown.out.splitlines()] == [
            *("commit", "branch", "committed", "changed", "A")
        ]
        done = branching(root, "show", "-p", "two")  # a run keeps no patch, a race does
        assert (done.code, done.out, "no patch was saved" in done.err) == (0, "", True)
        document = branching(root, "show", "two", "--json").document
        assert (document["commit"]["id"], document["changes"][0]["path"]) == (second["id"], "two")
        assert branching(root, "show", "three").code == 2
        refused = branching(root, "undo", str(first["id"]))
        assert (refused.code, (root / "two").exists()) == (2, True)
        assert f"branching undo {first['id']} --through" in refused.err
        dry = branching(root, "undo", "one", "--through", "--dry-run")
        assert [line.split()[-1] for line in dry.out.splitlines()] == ["two", "one"]
        assert (root / "two").exists()
        done = branching(root, "undo", "two")
        assert (done.code, (root / "two").exists(), (root / "one").exists()) == (0, False, True)
        assert branching(root, "undo", "two").code == 2
        assert branching(root, "redo").code == 0
        done = branching(root, "undo", str(first["id"]), "--through", "--json")
        assert [each["branch"] for each in done.document["commits"]] == ["two", "one"]
        assert not (root / "one").exists()

    def test_the_undo_of_many_paths_lists_the_first_and_counts_the_others(self, root: Path) -> None:
        many = "for i in $(seq 10 34); do touch $i; done"
        assert branching(root, "run", "--", "sh", "-c", many).code == 0
        lines = branching(root, "undo").out.splitlines()
        assert (len(lines), lines[19]) == (21, "  D 29")
        assert lines[-1] == "  ... and 5 more (--json lists all)"

    def test_a_checkpoint_is_restored(self, root: Path) -> None:
        def run(name: str) -> None:
            assert branching(root, "run", "--", "touch", name).code == 0

        def names() -> set[str]:
            return {path.name for path in root.iterdir()} - {NAME_FROM}

        assert branching(root, "save", "empty").code == 0
        run("one")
        saved = branching(root, "save", "after-one")
        assert saved.err == (
            "✓ saved checkpoint after-one · restore: branching restore after-one\n"
        )
        run("two")
        run("three")
        dry = branching(root, "restore", "after-one", "--dry-run")
        assert (dry.code, names()) == (0, {"one", "two", "three"})
        done = branching(root, "restore", "after-one", "--json")
        assert [each["changes"] for each in done.document["commits"]] == [1, 1]
        assert names() == {"one"}
        assert "nothing to restore" in branching(root, "restore", "after-one").err
        assert branching(root, "restore", "empty").code == 0
        assert names() == set()
        forward = branching(root, "restore", "after-one", "--json").document
        assert (forward["action"], names()) == ("redone", {"one"})
        listed = branching(root, "save", "--json").document["checkpoints"]
        assert [each["name"] for each in listed] == ["empty", "after-one"]
        assert branching(root, "restore", "none").code == 125

    def test_processes_that_save_at_the_same_time_lose_no_checkpoint(self, root: Path) -> None:
        script = """if True:
            import sys
            from branching import Workspace
            from branching.fs.checkpoints import Checkpoints

            with Workspace.open(sys.argv[1]) as space:
                print("open", flush=True)
                input()
                for number in range(20):
                    Checkpoints(space).save(f"{sys.argv[2]}{number}")
        """
        command = [sys.executable, "-c", script, str(root)]
        savers = [
            subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for name in "ab"
        ]
        for each in savers:
            assert each.stdout is not None
            assert each.stdout.readline() == b"open\n"
        for each in savers:
            assert each.stdin is not None
            each.stdin.write(b"\n")
            each.stdin.flush()
        for each in savers:
            each.communicate()
            assert each.returncode == 0
        with Workspace.open(root) as space:
            assert len(Checkpoints(space).all()) == 40

    def test_a_checkpoint_that_cannot_be_written_leaves_no_file(
        self, real_workspace: Workspace
    ) -> None:
        checkpoints = Checkpoints(real_workspace)
        kept = checkpoints.save("first")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))  # as a full disk, with EFBIG
        try:
            with pytest.raises(CommitError, match="'second' was not saved"):
                checkpoints.save("second")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert real_workspace.store is not None
        logs = {path.name for path in (real_workspace.store / "logs").iterdir()}
        assert (logs, checkpoints.all()) == ({"checkpoints", "kept"}, [kept])

    def test_a_checkpoint_that_the_history_does_not_reach_is_refused(self, root: Path) -> None:
        for name in ("one", "two", "three"):
            assert branching(root, "save", f"before-{name}").code == 0
            assert branching(root, "run", "--", "touch", name).code == 0
        assert branching(root, "prune", "--keep", "2").code == 0
        done = branching(root, "restore", "before-one")
        assert (done.code, "older than the history" in done.err) == (125, True)
        assert branching(root, "undo").code == 0
        assert branching(root, "run", "--", "touch", "other").code == 0
        assert branching(root, "restore", "before-two").code == 0
        assert (root / "one").exists()
        assert not (root / "other").exists()
        assert branching(root, "prune").code == 0
        assert "there is no checkpoint" in branching(root, "restore", "before-two").err

    def test_a_restore_that_meets_a_conflict_says_what_was_undone(self, root: Path) -> None:
        assert branching(root, "save", "start").code == 0
        for name in ("one", "two"):
            assert branching(root, "run", "--", "touch", name).code == 0
        (root / "one").write_text("mine")
        done = branching(root, "restore", "start")
        assert (done.code, (root / "two").exists(), (root / "one").exists()) == (125, False, True)
        assert "before that, 1 commit was undone" in done.err

    @pytest.mark.parametrize("command", ["undo", "redo"])
    def test_nothing_to_undo_is_a_failure_of_branching(self, root: Path, command: str) -> None:
        done = branching(root, command)
        assert (done.code, done.out, "error: nothing was " in done.err) == (125, "", True)
