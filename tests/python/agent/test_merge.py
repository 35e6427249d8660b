"""Merging a winner: what lands, what is a conflict, what is undone.

On a real mount: what is frozen, and what a commit refuses, is the file system's to say.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import pytest
from conftest import Mounted
from support.agents import (
    Script,
    ScriptedRunner,
    all_ended,
    branch_of,
    coordinator,
    forever,
    run,
    specs,
    until,
    writing,
)

from branching import Branch, BranchStaleError, CommitError, ConflictError, Workspace
from branching.agent import process_cleanup
from branching.agent.branch_runtime import FORK_VARIABLE
from branching.agent.coordinator import ForkCoordinator
from branching.agent.copy_paths import TreeCopier
from branching.agent.errors import ForkStateError, MergeConflictError
from branching.agent.fork_files import ForkFiles
from branching.agent.parent_workspace import ParentWorkspace
from branching.agent.types import MergeOptions, MergeResult
from branching.fs.confined_dir import ConfinedDir

SEED = "seed.txt"


async def picked(made: ForkCoordinator, label: str, **options: Any) -> MergeResult:
    return await made.merge_or_select(f"pick:{branch_of(made, label).id}", MergeOptions(**options))


@pytest.mark.contract("B11", "D10", "F10", "L20")
def test_only_the_winners_files_are_merged(real: Mounted) -> None:
    """Writes, deletions and directories are merged; losers leave no file and no branch."""
    (real.base / "old").mkdir()
    (real.base / "old" / "gone").write_text("x")

    async def wins(runner: ScriptedRunner) -> None:
        runner.write("new/deep/file", "mine")
        runner.write(SEED, "changed")
        assert runner.branch.overlay is not None
        runner.branch.overlay.delete("old")
        await runner.say("ready")

    async def work() -> None:
        with Workspace(real.root) as workspace:
            made = coordinator(workspace, {"a": wins, "b": writing(other="theirs")})
            handle = await made.fork(
                specs("a", "b"), parent_history=[{"role": "user", "content": "hi"}]
            )
            await all_ended(made)
            result = await picked(made, "a")
            assert result.applied_paths == ("new/deep/file", SEED)
            assert result.deleted_paths == ("old/gone",)
            assert result.applied_changes >= len(result.applied_paths)
            assert (result.conflicts, result.errors) == ((), ())
            assert result.winner_branch_id == handle.branches[0].id
            assert result.discarded_branches == (handle.branches[1].id,)
            assert [m["content"] for m in result.history_after_merge] == ["hi", "go a", "ready"]
            assert "kept branch a" in result.notice
            assert made.is_resolved
            assert workspace.branches() == []
            await made.aclose()

    run(work())
    assert (real.base / "new/deep/file").read_text() == "mine"
    assert (real.base / SEED).read_text() == "changed"
    assert not (real.base / "old").exists()
    assert not (real.base / "other").exists()


@pytest.mark.contract("L14")
def test_branches_that_run_do_not_see_each_others_files(real: Mounted) -> None:
    """Each writes, waits until the other has written, and looks."""
    seen: dict[str, tuple[str, list[str]]] = {}
    written: list[str] = []

    def looking(label: str) -> Callable[[ScriptedRunner], Awaitable[None]]:
        async def script(runner: ScriptedRunner) -> None:
            runner.write(SEED, label)
            runner.write(f"only-{label}", label)
            written.append(label)
            while len(written) < 2:
                await asyncio.sleep(0.01)
            path = runner.branch.path
            assert path is not None
            names = sorted(each.name for each in path.glob("only-*"))
            seen[label] = (path / SEED).read_text(), names
            await runner.say("looked")

        return script

    async def work() -> None:
        with Workspace(real.root) as workspace:
            made = coordinator(workspace, {each: looking(each) for each in ("a", "b")})
            await made.fork(specs("a", "b"), parent_history=[])
            await all_ended(made)
            await made.aclose()

    run(work())
    assert seen == {"a": ("a", ["only-a"]), "b": ("b", ["only-b"])}


async def makes_setuid(runner: ScriptedRunner) -> None:
    """A run that makes a program that gives the rights of its owner to all users."""
    runner.write("tool", "#!/bin/sh")
    assert runner.branch.path is not None
    (runner.branch.path / "tool").chmod(0o4755)
    runner.write("other", "x")


@pytest.mark.parametrize("only", [(), ("tool",)], ids=["all", "a part"])
def test_a_merged_program_with_privileges_is_warned_of(forked: Forked, only: tuple[str]) -> None:
    result = forked.merge(makes_setuid, only=only)
    assert [(change.path, change.privileges) for change in result.privileged] == [
        ("tool", ("set-user-ID",))
    ]
    assert "warning: the commit has 'tool' with set-user-ID" in result.notice
    assert forked.base.joinpath("tool").stat().st_mode & 0o4000


PARENT = [{"role": "user", "content": "hi"}]


async def idle(runner: ScriptedRunner) -> None:
    """A run that changes nothing."""


@pytest.fixture
def forked(real: Mounted) -> Forked:
    return Forked(real)


class Forked:
    """A fork of main with the branches a and b, which have ended, and what a test does to it."""

    def __init__(self, real: Mounted) -> None:
        self.base, self.root = real.base, real.root
        self.made: ForkCoordinator | None = None

    def merge(
        self,
        a: Script,
        *,
        meanwhile: Callable[[Forked], None] = lambda forked: None,
        b: Script = idle,
        then: Callable[[Forked], None] = lambda forked: None,
        **options: Any,
    ) -> MergeResult:
        """Forks, lets both runs end, does something `meanwhile`, and picks a."""

        async def work() -> MergeResult:
            with Workspace(self.root) as workspace:
                self.made = made = coordinator(workspace, {"a": a, "b": b})
                await made.fork(specs("a", "b"), parent_history=PARENT)
                try:
                    await all_ended(made)
                    meanwhile(self)
                    result = await picked(made, "a", **options)
                    assert made.is_resolved
                    assert workspace.branches() == []
                    return result
                finally:
                    then(self)
                    await made.aclose()

        return run(work())

    @property
    def parent(self) -> Path:
        """The directory in which the parent works."""
        assert self.made is not None
        assert self.made.parent_path is not None
        return self.made.parent_path


def by_a_third(forked: Forked) -> None:
    """Another program edits the directory itself."""
    (forked.base / SEED).write_text("third\n")


def by_the_parent(forked: Forked) -> None:
    """The parent goes on, in its own branch."""
    (forked.parent / SEED).write_text("parent\n")


def deleted_by_the_parent(forked: Forked) -> None:
    (forked.parent / SEED).unlink()


MINE = writing(**{SEED: "mine\n", "new": "new\n"})


def test_a_fork_that_another_commit_has_overtaken_names_the_conflict(real: Mounted) -> None:
    """Under first-winner. It can only be aborted, and what was committed stays."""

    async def work() -> None:
        with Workspace(real.root) as workspace:
            made = coordinator(workspace, {"a": writing(**{SEED: "mine"})})
            await made.fork(specs("a"), parent_history=[])
            await all_ended(made)
            with workspace.branch("other") as branch:
                (branch.path / SEED).write_text("theirs")
            with pytest.raises(BranchStaleError, match="nothing was merged") as caught:
                await picked(made, "a")
            assert "abort the fork" in str(caught.value.hint)
            await made.abort_fork()
            assert workspace.branches() == []

    run(work())
    assert (real.base / SEED).read_text() == "theirs"


@pytest.mark.contract("F7", "F8")
@pytest.mark.parametrize(
    ("meanwhile", "stays"),
    [(by_a_third, "third\n"), (by_the_parent, "parent\n"), (deleted_by_the_parent, None)],
)
class TestConflict:
    """Another process changed a path that the winner changed."""

    @pytest.mark.contract("F8", "F9", "P9")
    def test_by_default_the_newer_content_stays_and_the_path_is_reported(
        self, forked: Forked, meanwhile: Callable[[Forked], None], stays: str | None
    ) -> None:
        result = forked.merge(MINE, meanwhile=meanwhile)
        assert result.conflicts == (SEED,)
        assert result.applied_paths == ("new",)
        found = (forked.base / SEED).read_text() if (forked.base / SEED).exists() else None
        assert found == stays
        assert (forked.base / "new").read_text() == "new\n"
        assert f"1 conflict: {SEED}" in result.notice

    @pytest.mark.contract("F8")
    def test_the_version_of_the_branch_is_written_and_reported(
        self, forked: Forked, meanwhile: Callable[[Forked], None], stays: str | None
    ) -> None:
        result = forked.merge(MINE, meanwhile=meanwhile, on_conflict="theirs")
        assert result.conflicts == (SEED,)
        assert (forked.base / SEED).read_text() == "mine\n"

    def test_fail_merges_nothing_and_the_fork_continues(
        self, forked: Forked, meanwhile: Callable[[Forked], None], stays: str | None
    ) -> None:
        def goes_on(forked: Forked) -> None:
            assert forked.made is not None
            assert not forked.made.is_resolved
            assert {b.status.state for b in forked.made.branches.values()} == {"done"}

        with pytest.raises(MergeConflictError) as caught:
            forked.merge(MINE, meanwhile=meanwhile, then=goes_on, on_conflict="fail")
        assert caught.value.paths == (SEED,)
        assert not (forked.base / "new").exists()

    def test_the_same_result_is_no_conflict(
        self, forked: Forked, meanwhile: Callable[[Forked], None], stays: str | None
    ) -> None:
        async def the_same(runner: ScriptedRunner) -> None:
            assert runner.branch.path is not None
            if stays is None:
                (runner.branch.path / SEED).unlink()
            else:
                runner.write(SEED, stays)
            await runner.say("same")

        result = forked.merge(the_same, meanwhile=meanwhile)
        assert result.conflicts == ()


@pytest.mark.contract("F7", "P10")
def test_an_edit_between_the_fork_and_the_first_write_is_a_conflict(real: Mounted) -> None:
    """The branch writes after the file was edited outside, and has seen the edit."""

    async def work() -> None:
        with Workspace(real.root) as workspace:
            edited = asyncio.Event()

            async def late(runner: ScriptedRunner) -> None:
                await edited.wait()
                runner.write(SEED, "mine\n")
                await runner.say("late")

            made = coordinator(workspace, {"a": late})
            await made.fork(specs("a"), parent_history=PARENT)
            (real.base / SEED).write_text("third\n")
            edited.set()
            result = await picked(made, "a")
            assert result.conflicts == (SEED,)
            await made.aclose()

    run(work())
    assert (real.base / SEED).read_text() == "third\n"


def _touch(path: Path) -> None:
    os.utime(path)


def _link(path: Path) -> None:
    path.with_name("other name").hardlink_to(path)


def _make_executable(path: Path) -> None:
    path.chmod(0o700)


def _replace_by_a_copy(path: Path) -> None:
    """Replaces a file by an equal copy, as some editors do when they save."""
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.replace(path)


@pytest.mark.contract("F7")
@pytest.mark.parametrize(
    ("change", "deletes"),
    [
        *((change, False) for change in (_touch, _link, _replace_by_a_copy)),
        (_make_executable, False),
        (_touch, True),
    ],
    ids=["touch", "link", "copy", "chmod", "touch of a deleted file"],
)
def test_a_file_that_others_only_touched_is_no_conflict(
    real: Mounted,
    change: Callable[[Path], object],
    deletes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the content counts. The mode that others set, and files that they added, are kept.

    The change comes right after `wait`, however long it takes to record what the files were.
    """
    record = ForkFiles.record_originals

    def slowly(self: ForkFiles, branches: Iterable[Branch]) -> None:
        time.sleep(0.2)
        record(self, branches)

    monkeypatch.setattr(ForkFiles, "record_originals", slowly)

    async def wins(runner: ScriptedRunner) -> None:
        assert runner.branch.overlay is not None
        if deletes:
            runner.branch.overlay.delete(SEED)
        else:
            runner.write(SEED, "mine\n")
        await runner.say("done")

    async def work() -> MergeResult:
        with Workspace(real.root) as workspace:
            made = coordinator(workspace, {"a": wins})
            await made.fork(specs("a"))
            await made.wait()
            change(real.base / SEED)
            result = await picked(made, "a")
            assert workspace.branches() == []
            await made.aclose()
            return result

    before = stat.S_IMODE((real.base / SEED).stat().st_mode)
    mode = change is _make_executable
    result = run(work())
    assert result.conflicts == ()
    if deletes:
        assert not (real.base / SEED).exists()
        return
    assert (real.base / SEED).read_text() == "mine\n"
    assert stat.S_IMODE((real.base / SEED).stat().st_mode) == (0o700 if mode else before)


class TestOwn:
    """The parent's own changes against those of others in the base directory."""

    @pytest.mark.parametrize(("own", "stays"), [("force", "parent\n"), ("skip", "third\n")])
    @pytest.mark.parametrize("ends", ["merge", "abort"])
    def test_nothing_is_lost_without_being_asked(
        self, real: Mounted, own: Literal["force", "skip"], stays: str, ends: str
    ) -> None:
        async def work() -> None:
            with Workspace(real.root) as workspace:
                made = coordinator(workspace, {"a": writing(new="x")})
                await made.fork(specs("a"))
                await all_ended(made)
                assert made.parent_path is not None
                (made.parent_path / SEED).write_text("parent\n")
                (real.base / SEED).write_text("third\n")

                async def end(options: MergeOptions) -> None:
                    if ends == "merge":
                        action = f"pick:{branch_of(made, 'a').id}"
                        assert (await made.merge_or_select(action, options)).conflicts == ()
                    else:
                        await made.abort_fork(options)

                with pytest.raises(ConflictError) as caught:
                    await end(MergeOptions())
                assert caught.value.paths == (SEED,)
                assert not made.is_resolved
                assert (real.base / SEED).read_text() == "third\n"
                assert not (real.base / "new").exists()
                await end(MergeOptions(own=own))
                assert workspace.branches() == []
                await made.aclose()

        run(work())
        assert (real.base / SEED).read_text() == stays
        assert (real.base / "new").exists() == (ends == "merge")


@pytest.mark.contract("F7")
def test_an_edit_right_after_the_fork_has_a_later_time(real: Mounted) -> None:
    """The file system's clock is coarse: `now_ns` waits for its next tick."""
    with Workspace(real.root) as workspace:
        place = ParentWorkspace(workspace)
        for _ in range(30):
            moment = place.now_ns()
            (real.base / SEED).write_text("edited")
            assert (real.base / SEED).stat().st_ctime_ns > moment
        assert (real.base / SEED).stat().st_ctime_ns <= place.now_ns()


@pytest.mark.contract("F1", "F14", "P11")
def test_a_branch_does_not_see_later_writes_of_the_parent(forked: Forked) -> None:
    def meanwhile(forked: Forked) -> None:
        (forked.parent / SEED).write_text("later\n")
        assert forked.made is not None
        for branch in forked.made.branches.values():
            assert branch.overlay is not None
            assert branch.overlay.read(SEED) == "seed\n"
        with pytest.raises(OSError, match="Read-only"):
            (forked.root / SEED).write_text("past the fork")

    assert forked.merge(writing(new="x"), meanwhile=meanwhile).conflicts == ()
    assert (forked.base / SEED).read_text() == "later\n"
    assert (forked.base / "new").read_text() == "x"


@pytest.mark.contract("F8")
class TestMerge3:
    """Text is merged line by line."""

    LINES = "".join(f"line {number}\n" for number in range(9))

    def edits(self, number: int, text: str) -> str:
        return self.LINES.replace(f"line {number}\n", text)

    def merge(
        self, forked: Forked, parents: str, mine: str, *, chmods: bool = False
    ) -> MergeResult:
        (forked.base / "text").write_text(self.LINES)
        (forked.base / "text").chmod(0o755)

        def meanwhile(forked: Forked) -> None:
            (forked.parent / "text").write_text(parents)

        async def script(runner: ScriptedRunner) -> None:
            runner.write("text", mine)
            if chmods:
                (runner.branch.path or forked.base).joinpath("text").chmod(0o700)
            await runner.say("done")

        return forked.merge(script, meanwhile=meanwhile, on_conflict="merge3")

    def test_changes_of_different_lines_are_both_there(self, forked: Forked) -> None:
        result = self.merge(forked, self.edits(1, "parent\n"), self.edits(7, "mine\n"))
        assert result.conflicts == ()
        assert result.applied_paths == ("text",)
        expected = self.edits(1, "parent\n").replace("line 7\n", "mine\n")
        assert (forked.base / "text").read_text() == expected
        assert (forked.base / "text").stat().st_mode & 0o777 == 0o755

    def test_the_mode_is_merged_too(self, forked: Forked) -> None:
        mine = self.edits(7, "mine\n")
        assert self.merge(forked, self.edits(1, "p\n"), mine, chmods=True).conflicts == ()
        assert (forked.base / "text").stat().st_mode & 0o777 == 0o700

    def test_changes_of_one_line_are_a_conflict(self, forked: Forked) -> None:
        result = self.merge(forked, self.edits(1, "parent\n"), self.edits(1, "mine\n"))
        assert result.conflicts == ("text",)
        assert (forked.base / "text").read_text() == self.edits(1, "parent\n")


@pytest.mark.contract("L13")
class TestChoice:
    """Selected paths, directories and hunks are merged."""

    def test_of_paths(self, forked: Forked) -> None:
        files = writing(d__one="1", d__two="2", three="3")
        result = forked.merge(files, only=("d", "three"), exclude=("d/two",))
        assert result.applied_paths == ("d/one", "three")
        assert not (forked.base / "d/two").exists()

    def test_of_hunks(self, forked: Forked) -> None:
        lines = [f"line {number}\n" for number in range(40)]
        (forked.base / "text").write_text("".join(lines))
        changed = ["first\n", *lines[1:20], "middle\n", *lines[21:39], "last\n"]
        forked.merge(writing(text="".join(changed)), hunks={"text": [0, 2]})
        expected = ["first\n", *lines[1:39], "last\n"]
        assert (forked.base / "text").read_text() == "".join(expected)

    def test_of_a_hunk_that_is_not_there(self, forked: Forked) -> None:
        with pytest.raises(ValueError, match="there is no 5"):
            forked.merge(writing(**{SEED: "x\n"}), hunks={SEED: [5]})

    def test_of_hunks_of_a_file_that_the_winner_did_not_change(self, forked: Forked) -> None:
        with pytest.raises(ValueError, match="no changes of other"):
            forked.merge(writing(**{SEED: "x\n"}), hunks={"other": [0]})


@pytest.mark.contract("F7")
def test_removing_a_directory_in_which_the_parent_made_a_file_is_a_conflict(forked: Forked) -> None:
    """The winner removed a directory in which the parent has created a file since."""
    (forked.base / "d").mkdir()
    (forked.base / "d" / "old").write_text("x")

    async def removes(runner: ScriptedRunner) -> None:
        assert runner.branch.overlay is not None
        runner.branch.overlay.delete("d")
        await runner.say("gone")

    def adds(forked: Forked) -> None:
        (forked.parent / "d/new").write_text("n")

    result = forked.merge(removes, meanwhile=adds)
    assert result.conflicts == ("d",)
    assert sorted(path.name for path in (forked.base / "d").iterdir()) == ["new"]


def test_a_file_in_a_directory_that_the_parent_removed_is_a_conflict(forked: Forked) -> None:
    (forked.base / "d").mkdir()
    (forked.base / "d" / "old").write_text("x")
    result = forked.merge(
        writing(d__new="n"), meanwhile=lambda forked: shutil.rmtree(forked.parent / "d")
    )
    assert result.conflicts == ("d/new",)
    assert not (forked.base / "d").exists()


@pytest.mark.parametrize("is_copied", [False, True], ids=["moved", "copied"])
def test_binary_files_survive_a_merge(forked: Forked, is_copied: bool) -> None:
    """Modes, links, ignored directories, a repository. A winner's files are moved, or copied if the
    parent changed files too."""
    subprocess.run(["git", "init", "-q", str(forked.base)], check=True)

    def shape(top: Path) -> None:
        assert (top / "run.sh").stat().st_mode & 0o777 == 0o755
        assert (top / "link").readlink() == Path("run.sh")
        assert (top / "build" / "x").read_text() == "built"
        assert (top / "build" / "same").samefile(top / "run.sh")
        log = subprocess.run(
            ["git", "log", "--format=%s"], cwd=top, capture_output=True, text=True, check=True
        )
        assert log.stdout == "from the branch\n"

    async def works(runner: ScriptedRunner) -> None:
        script = """
            printf '#!/bin/sh\\n' > run.sh && chmod 755 run.sh && ln -s run.sh link
            mkdir build && printf built > build/x && git add run.sh link
            ln run.sh build/same
            git -c user.name=a -c user.email=a@b commit -qm 'from the branch'
        """
        subprocess.run(["sh", "-ec", script], cwd=runner.branch.path, check=True)
        await runner.say("committed")

    def goes_on(forked: Forked) -> None:
        if is_copied:
            (forked.parent / "p").write_text("x")

    forked.merge(works, meanwhile=goes_on)
    shape(forked.base)


@pytest.mark.contract("F4")
def test_changes_made_by_commands_are_reported(forked: Forked) -> None:
    async def shell(runner: ScriptedRunner) -> None:
        script = f"rm {SEED}; mkdir -p a/b; echo x > a/b/c"
        subprocess.run(["sh", "-ec", script], cwd=runner.branch.path, check=True)
        assert runner.branch.overlay is not None
        told = {(change.path, change.op) for change in runner.branch.overlay.changes()}
        assert told == {(SEED, "delete"), ("a", "mkdir"), ("a/b", "mkdir"), ("a/b/c", "write")}
        await runner.say("done")

    result = forked.merge(shell)
    assert (result.applied_paths, result.deleted_paths) == (("a/b/c",), (SEED,))


@pytest.mark.contract("B19", "F6")
def test_a_path_that_cannot_be_merged_stops_the_merge_by_default(forked: Forked) -> None:
    """All or nothing."""
    fixed = forked.base / "fixed"
    fixed.write_text("fixed")
    subprocess.run(["chattr", "+i", str(fixed)], check=True)
    files = writing(fixed="mine", other="mine")
    try:
        with pytest.raises(CommitError, match="fixed"):
            forked.merge(files)
        assert not (forked.base / "other").exists()
    finally:
        subprocess.run(["chattr", "-i", str(fixed)], check=True)
    assert fixed.read_text() == "fixed"


@pytest.mark.contract("B19", "F6")
@pytest.mark.parametrize("names", [("fixed",), ("fixed", "also [x]*")], ids=["one", "two"])
@pytest.mark.parametrize("is_copied", [False, True], ids=["moved", "copied"])
def test_files_that_the_base_does_not_let_go_are_left_out_if_requested(
    forked: Forked, names: tuple[str, ...], is_copied: bool
) -> None:
    """Where the parent has changed something too, the winner's files are copied first."""
    immutable = [forked.base / name for name in names]
    for path in immutable:
        path.write_text("fixed")

    def meanwhile(forked: Forked) -> None:
        if is_copied:
            (forked.parent / "own").write_text("parent")

    subprocess.run(["chattr", "+i", *immutable], check=True)
    files = dict.fromkeys(names, "mine")
    try:
        result = forked.merge(writing(**files, other="mine"), meanwhile=meanwhile, atomic=False)
    finally:
        subprocess.run(["chattr", "-i", *immutable], check=True)
    assert sorted(error.path for error in result.errors) == sorted(names)
    assert all("Operation not permitted" in error.message for error in result.errors)
    assert result.applied_paths == ("other",)
    assert (forked.base / "other").read_text() == "mine"
    assert [path.read_text() for path in immutable] == ["fixed"] * len(names)
    assert (forked.base / "own").exists() == is_copied


@pytest.mark.contract("B19", "F6")
def test_a_file_of_the_parent_that_the_base_does_not_let_go_refuses_the_merge(
    forked: Forked,
) -> None:
    """The parent's own work is not dropped for a winner's."""
    fixed = forked.base / "fixed"
    fixed.write_text("fixed")

    def meanwhile(forked: Forked) -> None:
        (forked.parent / "fixed").write_text("parent")

    subprocess.run(["chattr", "+i", str(fixed)], check=True)
    try:
        with pytest.raises(CommitError):
            forked.merge(writing(other="mine"), meanwhile=meanwhile, atomic=False)
    finally:
        subprocess.run(["chattr", "-i", str(fixed)], check=True)
    assert not (forked.base / "other").exists()


@pytest.mark.contract("B19", "F6")
def test_the_other_paths_are_applied_if_requested(
    forked: Forked, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = TreeCopier.make

    def failing(self: TreeCopier, path: str) -> None:
        if path == "bad":
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        make(self, path)

    monkeypatch.setattr(TreeCopier, "make", failing)
    files = writing(bad="x", good="y", left="z")
    with pytest.raises(CommitError, match="bad: Disk quota exceeded"):
        forked.merge(files, exclude=("left",))
    assert not (forked.base / "good").exists()
    result = forked.merge(files, atomic=False, exclude=("left",))
    assert [(error.path, error.message) for error in result.errors] == [
        ("bad", "Disk quota exceeded")
    ]
    assert result.applied_paths == ("good",)
    assert (forked.base / "good").read_text() == "y"
    assert "error: bad" in result.notice


def test_no_writes_give_empty_paths(forked: Forked) -> None:
    result = forked.merge(writing())
    assert (result.applied_paths, result.applied_changes, result.deleted_paths) == ((), 0, ())


@pytest.mark.contract("D10", "D11", "D12")
class TestWinner:
    """Which branch can win, and with which conversation."""

    @pytest.mark.contract("D11")
    def test_a_terminated_branch_can_win_with_its_partial_history(self, real: Mounted) -> None:
        async def work() -> None:
            with Workspace(real.root) as workspace:
                made = coordinator(workspace, {"a": forever})
                await made.fork(specs("a"), parent_history=PARENT)
                branch = branch_of(made, "a")
                await until(lambda: len(branch.partial_history or []) == 3)
                await made.terminate_branch(branch.id)
                result = await picked(made, "a")
                said = [message["content"] for message in result.history_after_merge]
                assert said == ["hi", "go a", "working"]
                await made.aclose()

        run(work())

    @pytest.mark.contract("D12")
    def test_a_branch_without_a_message_cannot_win(self, real: Mounted) -> None:
        """It does not fall back to the history before the fork."""

        async def silent(runner: ScriptedRunner) -> None:
            await asyncio.Event().wait()

        async def work() -> None:
            with Workspace(real.root) as workspace:
                made = coordinator(workspace, {"a": silent})
                await made.fork(specs("a"), parent_history=PARENT)
                await made.terminate_branch(branch_of(made, "a").id)
                with pytest.raises(RuntimeError, match="before it produced a message"):
                    await picked(made, "a")
                assert not made.is_resolved
                await made.aclose()

        run(work())

    def test_one_that_failed_cannot_win(self, real: Mounted) -> None:
        async def fails(runner: ScriptedRunner) -> None:
            raise KeyError("k")

        async def work() -> None:
            with Workspace(real.root) as workspace:
                made = coordinator(workspace, {"a": fails})
                await made.fork(specs("a"))
                with pytest.raises(ForkStateError, match="KeyError") as caught:
                    await picked(made, "a")
                assert isinstance(caught.value.__cause__, KeyError)
                await made.aclose()

        run(work())

    @pytest.mark.contract("D10", "D19")
    def test_it_is_awaited_while_others_can_be_stopped(self, real: Mounted) -> None:
        """The lock is not held while the merge waits for the winner."""

        async def work() -> None:
            with Workspace(real.root) as workspace:
                may_end = asyncio.Event()

                async def slow(runner: ScriptedRunner) -> None:
                    await may_end.wait()
                    runner.write("slow", "x")
                    await runner.say("slow")

                made = coordinator(workspace, {"a": slow, "b": forever})
                await made.fork(specs("a", "b"))
                merging = asyncio.create_task(picked(made, "a"))
                await asyncio.sleep(0)
                await made.terminate_branch(branch_of(made, "b").id)
                assert not merging.done()
                may_end.set()
                assert (await merging).applied_paths == ("slow",)
                await made.aclose()

        run(work())

    @pytest.mark.contract("D10")
    def test_losers_are_stopped_before_files_are_merged(self, real: Mounted) -> None:
        """Also a process that outlives its run."""

        async def leaves_a_process(runner: ScriptedRunner) -> None:
            environment = {**os.environ, **runner.branch.environment}
            script = "setsid sh -c 'while :; do echo x >> late; sleep 0.01; done' >/dev/null 2>&1 &"
            subprocess.run(
                ["sh", "-c", script], cwd=runner.branch.path, env=environment, check=True
            )
            await runner.say("left")
            overlay = runner.branch.overlay
            assert overlay is not None
            await until(lambda: overlay.exists("late"))
            await forever(runner)

        async def work() -> None:
            with Workspace(real.root) as workspace:
                made = coordinator(workspace, {"a": writing(x="x"), "b": leaves_a_process})
                await made.fork(specs("a", "b"))
                other = branch_of(made, "b")
                await until(lambda: len(other.partial_history or []) >= 2)
                await picked(made, "a")
                assert other.status.state == "terminated"
                assert process_cleanup._marked(FORK_VARIABLE, f"{made.fork_id}/") == set()
                await made.aclose()

        run(work())
        assert not (real.base / "late").exists()


class TestOverlayDriver:
    """It serves the policy first-winner alone, and forks all the same."""

    def test_a_winner_alone(self, overlaid: Mounted) -> None:
        result = Forked(overlaid).merge(MINE, b=writing(other="x"))
        assert result.applied_paths == ("new", SEED)
        assert (overlaid.base / SEED).read_text() == "mine\n"
        assert not (overlaid.base / "other").exists()

    def test_a_merge_keeps_the_parents_changes_beside_the_winners(self, overlaid: Mounted) -> None:
        def meanwhile(forked: Forked) -> None:
            by_the_parent(forked)
            (forked.parent / "own").write_text("x")

        result = Forked(overlaid).merge(MINE, meanwhile=meanwhile)
        assert result.conflicts == (SEED,)
        assert result.applied_paths == ("new",)
        assert (overlaid.base / SEED).read_text() == "parent\n"
        assert (overlaid.base / "own").read_text() == "x"

    def test_an_edit_of_others_is_a_conflict(self, overlaid: Mounted) -> None:
        result = Forked(overlaid).merge(MINE, meanwhile=by_a_third)
        assert result.conflicts == (SEED,)
        assert (overlaid.base / SEED).read_text() == "third\n"


def test_a_name_that_others_deleted_first_is_a_new_file_of_the_winner(real: Mounted) -> None:
    """The one conflict that is not detected: no copy of the deleted file exists."""

    async def work() -> None:
        with Workspace(real.root) as workspace:
            deleted = asyncio.Event()

            async def late(runner: ScriptedRunner) -> None:
                await deleted.wait()
                runner.write(SEED, "mine\n")
                await runner.say("late")

            made = coordinator(workspace, {"a": late})
            await made.fork(specs("a"), parent_history=PARENT)
            (real.base / SEED).unlink()
            deleted.set()
            result = await picked(made, "a")
            assert (result.applied_paths, result.conflicts) == ((SEED,), ())
            await made.aclose()

    run(work())
    assert (real.base / SEED).read_text() == "mine\n"


@pytest.mark.contract("F7")
class TestThirdAtEveryStep:
    """Another process edits the base directory at each step of a merge in turn. Goal: its edits
    is never lost, and the merge is whole or has not happened. The steps are the calls that the
    merge makes of branches and trees; they are counted once, and each is tried."""

    STEPS = ((Branch, ("diff", "commit", "branch", "abort")), (ConfinedDir, ("lstat",)))

    @pytest.mark.contract("F7")
    @pytest.mark.parametrize("kind", ["edit", "delete"])
    @pytest.mark.parametrize("is_copied", [False, True], ids=["moved", "copied"])
    def test_no_change_of_another_writer_is_lost(
        self, real: Mounted, kind: str, is_copied: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mine = {SEED: "mine\n", "new": "new\n"}
        theirs: dict[str, str] = {SEED: "third\n"} if kind == "edit" else {}
        last = self.merged(real, mine, is_copied, 10**9, kind, monkeypatch)
        assert last > 5
        outcomes = set()
        for step in range(last):
            (real.base / SEED).write_text("seed\n")
            for name in ("new", "own"):
                (real.base / name).unlink(missing_ok=True)
            outcome = self.merged(real, mine, is_copied, step, kind, monkeypatch)
            found = {path.name: path.read_text() for path in real.base.iterdir() if path.is_file()}
            own = {"own": "parent\n"} if is_copied else {}
            allowed: dict[Any, dict[str, str]] = {
                "refused": {**theirs, **own},
                "conflict": {**theirs, "new": "new\n", **own},
                "after": {**theirs, "new": "new\n", **own},
            }
            assert found == allowed[outcome], (step, outcome)
            outcomes.add(outcome)
        assert "conflict" in outcomes
        assert "refused" in outcomes

    def merged(
        self,
        real: Mounted,
        mine: dict[str, str],
        is_copied: bool,
        at: int,
        kind: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> Any:
        """Merges, with the edit before that step. Returns what came of it, and without an edit the
        number of steps."""
        calls: list[str] = []
        committed: list[bool] = []

        def third() -> None:
            if kind == "edit":
                (real.base / SEED).write_text("third\n")
            else:
                (real.base / SEED).unlink()

        def counted(owner: type, name: str) -> None:
            step = getattr(owner, name)

            def stepping(self: Any, *arguments: Any, **options: Any) -> Any:
                calls.append(name)
                if len(calls) == at + 1:
                    third()
                    committed.append((real.base / "new").exists())
                return step(self, *arguments, **options)

            monkeypatch.setattr(owner, name, stepping)

        # A thread that records originals makes calls, too, at no certain time.
        monkeypatch.setattr(ForkFiles, "record_originals", lambda *_: None)

        async def work() -> Any:
            with Workspace(real.root) as workspace:
                made = coordinator(workspace, {"a": writing(**mine)})
                await made.fork(specs("a"), parent_history=PARENT)
                await all_ended(made)
                assert made.parent_path is not None
                if is_copied:
                    (made.parent_path / "own").write_text("parent\n")
                for owner, names in self.STEPS:
                    for name in names:
                        counted(owner, name)
                try:
                    result = await picked(made, "a")
                    if at >= len(calls):
                        return len(calls)
                    return "after" if committed[0] else "conflict" if result.conflicts else "lost"
                except ConflictError:
                    monkeypatch.undo()
                    assert not made.is_resolved
                    assert made._fork is not None
                    if made._fork.phase == "open":
                        return "refused"
                    # It was the last step: what is in the parent's branch can only land.
                    with pytest.raises(ConflictError, match="while the merge was completed"):
                        await made.abort_fork()
                    await picked(made, "a", own="skip")
                    return "conflict"
                finally:
                    monkeypatch.undo()
                    await made.aclose()

        return run(work())
