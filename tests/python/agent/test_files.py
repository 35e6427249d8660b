"""A branch's files: for tools, for editors, changed by a person."""

from __future__ import annotations

import asyncio
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Mounted
from support.agents import (
    ScriptedRunner,
    all_ended,
    branch_of,
    coordinator,
    run,
    specs,
    until,
    writing,
)

from branching import Workspace
from branching.agent.branch_files import BranchFiles
from branching.agent.external_edits import EditWatch, describe_edits
from branching.agent.materializer import DIRECTORY, directory_name, is_inside
from branching.fs import Branch
from branching.fs.confined_dir import ConfinedDir

SEED = "seed.txt"


def in_branch(real: Mounted, test: Callable[[BranchFiles, Branch], None]) -> None:
    with Workspace(real.root) as workspace, workspace.branch("b", None) as branch:
        test(BranchFiles(branch, workspace.owner), branch)
        branch.abort()


class TestOverlay:
    @pytest.mark.contract("F1")
    def test_reads_show_the_parents_file_until_the_branch_writes(self, real: Mounted) -> None:
        def test(files: BranchFiles, branch: Branch) -> None:
            assert files.read(SEED) == "seed\n"
            assert files.changes() == []
            files.write("d/new", b"\0")
            files.write(SEED, "mine\n")
            assert files.read_bytes("d/new") == b"\0"
            assert not (real.base / "d").exists()
            assert (real.base / SEED).read_text() == "seed\n"
            changes = files.changes()
            assert {(change.path, change.op) for change in changes} == {
                ("d", "mkdir"),
                ("d/new", "write"),
                (SEED, "edit"),
            }
            changes.clear()
            assert len(files.changes()) == 3  # a copy

        in_branch(real, test)

    @pytest.mark.contract("F2", "P16")
    def test_listing_and_searching_include_parent_and_branch(self, real: Mounted) -> None:
        """A search also finds files that the branch wrote."""
        (real.base / "d").mkdir()
        (real.base / "d" / "old.py").write_text("find me\n")

        def test(files: BranchFiles, branch: Branch) -> None:
            files.write("d/new.py", "and find me\n")
            files.write("d/sub/deep.py", "nothing\n")
            files.write("binary", b"find me\0")
            files.write("@user", "a file like any other")
            assert [hit.path for hit in files.grep("any other")] == ["@user"]
            assert [(one.path, one.is_dir) for one in files.ls_info()] == [
                ("@user", False),
                ("binary", False),
                ("d", True),
                (SEED, False),
            ]
            assert [one.path for one in files.ls_info("d")] == ["d/new.py", "d/old.py", "d/sub"]
            assert [one.path for one in files.glob_info("d/*.py")] == ["d/new.py", "d/old.py"]
            assert [one.path for one in files.glob_info("**/*.py")] == [
                "d/new.py",
                "d/old.py",
                "d/sub/deep.py",
            ]
            assert [one.path for one in files.glob_info("[!o]??.py", "d")] == ["d/new.py"]
            found = [(hit.path, hit.line_number, hit.line) for hit in files.grep("find")]
            assert found == [("d/new.py", 1, "and find me"), ("d/old.py", 1, "find me")]
            assert [hit.path for hit in files.grep("find", "d/old.py")] == ["d/old.py"]
            assert [hit.path for hit in files.grep("find", glob="n*.py")] == ["d/new.py"]
            with pytest.raises(re.error):
                files.grep("(")

        in_branch(real, test)

    @pytest.mark.contract("F2")
    def test_edit_replaces_exact_text(self, real: Mounted) -> None:
        def test(files: BranchFiles, branch: Branch) -> None:
            files.write("f", "a b a\n")
            with pytest.raises(ValueError, match="2 times"):
                files.edit("f", "a", "x")
            with pytest.raises(ValueError, match="does not occur in f"):
                files.edit("f", "y", "x")
            assert files.edit("f", "b", "c") == 1
            assert files.edit("f", "a", "x", replace_all=True) == 2
            assert files.read("f") == "x c x\n"

        in_branch(real, test)

    @pytest.mark.contract("F3")
    def test_a_deleted_path_is_hidden_until_it_is_written_again(self, real: Mounted) -> None:
        (real.base / "d" / "e").mkdir(parents=True)
        (real.base / "d" / "e" / "f").write_text("x")

        def test(files: BranchFiles, branch: Branch) -> None:
            files.delete("d")
            assert not files.exists("d/e/f")
            assert files.deleted() == {"d", "d/e", "d/e/f"}
            with pytest.raises(FileNotFoundError):
                files.delete("d")
            files.write("d/e/f", "back")
            assert files.read("d/e/f") == "back"
            assert "d/e/f" not in files.deleted()
            assert (real.base / "d" / "e" / "f").read_text() == "x"

        in_branch(real, test)

    @pytest.mark.contract("F5")
    def test_a_snapshot_is_an_independent_copy(self, real: Mounted) -> None:
        (real.base / ".venv").mkdir()
        (real.base / ".venv" / "python").write_text("py")

        def test(files: BranchFiles, branch: Branch) -> None:
            files.write("new", "x")
            files.delete(SEED)
            with files.snapshot() as copy:
                assert sorted(path.name for path in copy.iterdir()) == ["new"]
                assert not (copy / "new").is_symlink()
                files.write("new", "later")
                assert (copy / "new").read_text() == "x"
            assert not copy.exists()
            with files.snapshot(include_venv=True) as copy:
                assert (copy / ".venv").is_symlink()
                assert (copy / ".venv" / "python").read_text() == "py"

        in_branch(real, test)

    @pytest.mark.parametrize("path", ["/etc/passwd", "../x", "d/../../x", "out/passwd", ""])
    def test_no_path_leads_out(self, real: Mounted, path: str) -> None:
        """Also not over a link that a run has made."""

        def test(files: BranchFiles, branch: Branch) -> None:
            (branch.path / "out").symlink_to("/etc")
            for step in (files.read, files.delete, lambda path: files.write(path, "x")):
                with pytest.raises((OSError, ValueError)):
                    step(path)

        in_branch(real, test)


class TestMirror:
    @pytest.mark.contract("F13", "F15", "F17")
    def test_the_mirror_shows_touched_paths_of_all_branches_by_label(
        self, real: Mounted, place: Path
    ) -> None:
        """The mirror is current after each step of a run."""

        async def work() -> None:
            with Workspace(real.root) as workspace:
                go = asyncio.Event()

                async def works(runner: ScriptedRunner) -> None:
                    runner.write(SEED, "mine\n")
                    runner.write("d/temporary", "x")
                    await runner.say("wrote")
                    runner.branch.capture(runner.messages)
                    await go.wait()
                    assert runner.branch.overlay is not None
                    runner.branch.overlay.delete("d/temporary")
                    await runner.say("done")

                made = coordinator(
                    workspace, {"A": works, "b/../c": writing()}, materializer_root=place / "m"
                )
                await made.fork(specs("A", "b/../c"))
                top = place / "m" / DIRECTORY / str(made.fork_id)
                mine = top / "branches" / "A"
                touched = (mine / "d/temporary", mine / SEED, top / "parent" / SEED)
                await until(lambda: all(path.exists() for path in touched))
                assert (mine / SEED).read_text() == "mine\n"
                assert (top / "parent" / SEED).read_text() == "seed\n"
                assert (top / "parent" / SEED).stat().st_mode & 0o222 == 0
                assert sorted(path.name for path in (top / "parent").iterdir()) == [SEED]
                go.set()
                await until(lambda: not (mine / "d/temporary").exists())
                await all_ended(made)

                def states() -> list[str]:
                    manifest = json.loads((top / "manifest.json").read_text())
                    assert manifest["fork_id"] == made.fork_id
                    return [branch["state"] for branch in manifest["branches"]]

                await until(lambda: states() == ["done", "done"])
                assert sorted(path.name for path in (top / "branches").iterdir()) == ["A", "b-..-c"]
                await made.merge_or_select(f"pick:{branch_of(made, 'A').id}")
                assert not (place / "m" / ".pydantic-deep").exists()
                await made.aclose()

        run(work())
        assert (real.base / SEED).read_text() == "mine\n"

    def test_a_directory_that_becomes_a_file_and_back(self, real: Mounted, place: Path) -> None:
        async def work() -> None:
            with Workspace(real.root) as workspace:

                async def works(runner: ScriptedRunner) -> None:
                    runner.write("x/y", "deep")
                    await runner.say("directory")
                    assert runner.branch.overlay is not None
                    runner.branch.overlay.delete("x")
                    runner.write("x", "file")
                    await runner.say("file")
                    runner.branch.overlay.delete("x")
                    runner.write("x/z", "deep again")
                    await runner.say("directory again")

                made = coordinator(workspace, {"a": works}, materializer_root=place / "m")
                await made.fork(specs("a"))
                await all_ended(made)
                top = place / "m" / DIRECTORY / str(made.fork_id) / "branches" / "a"
                await until((top / "x" / "z").exists)
                assert not (top / "x" / "y").exists()
                await made.aclose()

        run(work())

    @pytest.mark.contract("F16", "F18")
    @pytest.mark.parametrize("ends", ["merge", "abort"])
    def test_keep_artifacts_keeps_the_mirror(self, real: Mounted, place: Path, ends: str) -> None:
        """Whether anything was merged does not matter."""

        async def work() -> None:
            with Workspace(real.root) as workspace:
                made = coordinator(
                    workspace, {"a": writing(f="x")}, materializer_root=place, keep_artifacts=True
                )
                await made.fork(specs("a"))
                await all_ended(made)
                if ends == "merge":
                    await made.merge_or_select(f"pick:{branch_of(made, 'a').id}")
                else:
                    await made.abort_fork()
                await made.aclose()
                kept = place / DIRECTORY / str(made.fork_id) / "branches" / "a" / "f"
                assert kept.read_text() == "x"

        run(work())
        assert (real.base / "f").exists() == (ends == "merge")

    @pytest.mark.contract("F19")
    @pytest.mark.parametrize("label", ["..", "/etc", "../../x", "a/b", ".hidden", "é ü"])
    def test_a_label_becomes_one_directory_name(self, label: str) -> None:
        name = directory_name(label)
        assert "/" not in name
        assert not name.startswith(".")
        assert name

    @pytest.mark.contract("F19")
    def test_a_path_cannot_leave_the_mirror(self) -> None:
        assert is_inside("a/b")
        assert not is_inside("../a")
        assert not is_inside("/a")
        assert not is_inside("a/../../b")

    def test_one_that_cannot_be_written_ends_no_run(self, real: Mounted, place: Path) -> None:
        async def work() -> None:
            with Workspace(real.root) as workspace:
                (place / "file").write_text("in the way")
                made = coordinator(
                    workspace, {"a": writing(f="x")}, materializer_root=place / "file"
                )

                async def runs(said: pytest.WarningsRecorder) -> None:
                    await made.fork(specs("a"))
                    await all_ended(made)
                    # The thread that refreshes the directory warns, perhaps only now.
                    await until(lambda: len(said) > 0)
                    assert branch_of(made, "a").status.state == "done"
                    await made.aclose()

                with pytest.warns(UserWarning, match="mirror of the fork") as said:
                    await runs(said)

        run(work())

    def test_runs_continue_in_a_program_that_makes_warnings_errors(
        self, real: Mounted, place: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The event loop's exception handler logs the warning, and the merge succeeds."""

        async def work() -> None:
            (place / "file").write_text("in the way")
            with Workspace(real.root) as workspace:
                made = coordinator(
                    workspace,
                    {"a": writing(f="x")},
                    materializer_root=place / "file",
                    keep_artifacts=True,
                )
                await made.fork(specs("a"))
                await all_ended(made)
                await made.merge_or_select(f"pick:{branch_of(made, 'a').id}")
                await made.aclose()
                assert workspace.branches() == []

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(work())
        assert (real.base / "f").read_text() == "x"
        said = [each.getMessage() for each in caplog.records if each.name == "asyncio"]
        assert said
        assert all("the mirror of the fork is not up to date" in each for each in said), said


class TestPerson:
    """The run is informed of a person's changes in the branch's directory."""

    def test_the_runs_own_changes_are_not_reported(self, real: Mounted) -> None:
        def test(files: BranchFiles, branch: Branch) -> None:
            owner = (0, 0)
            watch = EditWatch(
                branch, ConfinedDir(real.root, owner), ConfinedDir(branch.path, owner)
            )
            assert watch.edits() == []
            files.write("own", "x")
            watch.mark()
            assert watch.edits() == []
            files.write("d/person", "x")
            (branch.path / SEED).unlink()
            assert watch.edits() == ["d", "d/person", SEED]
            assert watch.edits() == []
            (branch.path / "own").write_text("y")
            (branch.path / "d" / "person").unlink()
            assert watch.edits() == ["d/person", "own"]

        in_branch(real, test)

    def test_edits_are_summarized(self) -> None:
        assert describe_edits([]) == ""
        assert describe_edits(["a"]).endswith("since your last step:\n- a")
        assert "… and 10 more" in describe_edits([str(number) for number in range(60)])

    @pytest.mark.contract("L11")
    def test_a_run_has_a_watch_of_its_own(self, real: Mounted) -> None:
        async def work() -> None:
            with Workspace(real.root) as workspace:

                async def works(runner: ScriptedRunner) -> None:
                    runner.write("own", "x")
                    await runner.branch.mark_own_edits()
                    assert await runner.branch.edits_of_others() == []
                    (Path(runner.branch.path or "") / "person").write_text("x")
                    assert await runner.branch.edits_of_others() == ["person"]
                    await runner.say("seen")

                made = coordinator(workspace, {"a": works})
                await made.fork(specs("a"))
                await all_ended(made)
                assert branch_of(made, "a").status.error is None
                await made.aclose()

        run(work())
