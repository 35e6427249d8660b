"""Workspaces of directories that are no mounts: mounted when needed, unmounted by the last user."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.branchfs import find_program, mounted
from support.command import Running, branching

from branching import MountError, Speculate, Workspace
from branching._linux.mountinfo import read_mounts
from branching.agent.fork_store import SQLiteForkStateStore
from branching.fs import automount, branchfs
from branching.fs.automount import PREFIX, base_around
from branching.fs.backend import Driver
from branching.fs.branchfs import CONTROL_XATTR


@pytest.fixture(autouse=True)
def _program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHFS", find_program())


@pytest.fixture
def base(place: Path) -> Path:
    """An ordinary directory."""
    path = place / "pro ject"
    path.mkdir()
    (path / "seed.txt").write_text("seed\n")
    return path


def mounts_of_ours() -> list[Path]:
    """Returns the mounts in the temporary directory of this run."""
    points = [mount.directory for mount in read_mounts() if mount.directory.name.startswith(PREFIX)]
    return [point for point in points if point.parent == Path(tempfile.gettempdir())]


class TestOpen:
    def test_a_directory_is_mounted_for_the_while(self, base: Path) -> None:
        before = mounts_of_ours()
        with Workspace.open(base) as workspace:
            assert workspace.base == base
            assert workspace.path not in before
            assert (workspace.path / "seed.txt").read_text() == "seed\n"
            with workspace.branch("b") as branch:
                (branch.path / "made").write_text("x")
        assert (base / "made").read_text() == "x"
        assert mounts_of_ours() == before
        assert not workspace.path.exists()

    def test_several_share_the_mount_and_the_last_unmounts(self, base: Path) -> None:
        first, second = Workspace.open(base), Workspace.open(base)
        assert first.path == second.path
        first.close()
        with second.branch("b") as branch:
            (branch.path / "made").write_text("x")
        second.close()
        second.close()  # a second time does nothing
        assert not second.path.exists()
        assert (base / "made").exists()

    def test_many_concurrent_ones_in_many_processes(self, base: Path) -> None:
        """Each process finds or makes a mount while others unmount."""
        script = (
            "import sys\nfrom branching import Workspace\n"
            "for turn in range(4):\n"
            "    with Workspace.open(sys.argv[1]) as w, w.branch(f'{sys.argv[2]}-{turn}',"
            " on_success=None) as b:\n"
            "        (b.path / 'x').write_text('x')\n"
            "        b.abort()\n"
        )
        children = [
            subprocess.Popen([sys.executable, "-c", script, str(base), str(number)])
            for number in range(6)
        ]
        assert [child.wait(60) for child in children] == [0] * 6
        assert not [point for point in mounts_of_ours() if base.parent in point.parents]

    def test_a_mount_made_by_hand_is_used_and_stays(self, base: Path, place: Path) -> None:
        with mounted(base, place / "mount") as point:
            with Workspace.open(base) as workspace:
                assert workspace.path == point
            assert point.is_mount()

    def test_inside_a_mount_it_is_that_mount(self, base: Path) -> None:
        with Workspace.open(base) as outer, Workspace.open(outer.path) as inner:
            assert inner.path == outer.path

    def test_kept_branches_are_there_again(self, base: Path) -> None:
        with Workspace.open(base) as workspace, workspace.branch("kept", on_success=None) as branch:
            (branch.path / "made").write_text("x")
        with Workspace.open(base) as workspace:
            workspace.reopen("kept").commit()
        assert (base / "made").read_text() == "x"

    def test_a_workspace_that_is_never_closed_leaves_no_mount(self, base: Path) -> None:
        script = (
            "import sys; from branching import Workspace\nprint(Workspace.open(sys.argv[1]).path)"
        )
        told = subprocess.run(
            [sys.executable, "-c", script, str(base)], capture_output=True, text=True, check=True
        )
        assert not Path(told.stdout.strip()).exists()

    def test_a_forked_child_does_not_unmount(self, base: Path) -> None:
        with Workspace.open(base) as workspace:
            pid = os.fork()
            if pid == 0:
                try:
                    workspace.close()
                finally:
                    os._exit(0)
            os.waitpid(pid, 0)
            assert workspace.branches() == []
            assert workspace.path.is_mount()

    @pytest.mark.parametrize("to", [None, "moved"])
    def test_a_removed_directory_leaves_no_mount(self, base: Path, to: str | None) -> None:
        before = mounts_of_ours()
        with Workspace.open(base) as workspace:
            if to is None:
                shutil.rmtree(base)
            else:
                base.rename(base.parent / to)
        assert mounts_of_ours() == before
        assert not workspace.path.exists()

    def test_a_pattern_on_it(self, base: Path) -> None:
        def candidate(path: Path) -> bool:
            (path / "made").write_text("x")
            return True

        with Workspace.open(base) as workspace:
            assert Speculate([candidate])(workspace).committed
        assert (base / "made").exists()

    def test_a_missing_directory_or_program_is_named(
        self, base: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(MountError, match="is not a directory"):
            Workspace.open(base / "seed.txt")
        monkeypatch.setenv("BRANCHFS", "/no/such/branchfs")
        with pytest.raises(MountError, match="no program '/no/such/branchfs'") as caught:
            Workspace.open(base)
        assert "cargo install" in (caught.value.hint or "")
        monkeypatch.setenv("BRANCHFS", "/bin/false")
        with pytest.raises(MountError, match="mount failed"):
            Workspace.open(base)


class TestBase:
    """The workspace that a command finds from a directory, where none is named."""

    @pytest.fixture
    def deep(self, place: Path) -> Path:
        path = place / "a" / "b" / "c"
        path.mkdir(parents=True)
        return path

    @staticmethod
    def keep_branches(directory: Path) -> Path:
        store = directory / ".branching"
        store.mkdir()
        (store / "format").write_text("branchfs 2\n")
        return store

    def test_it_is_the_nearest_directory_that_keeps_branches(self, deep: Path) -> None:
        assert base_around(deep) == deep
        (deep.parent / ".branching").mkdir()
        assert base_around(deep) == deep, "any directory can have that name"
        self.keep_branches(deep.parents[1])
        assert base_around(deep) == deep.parents[1]

    def test_a_store_of_another_owner_than_its_directory_does_not_count(
        self, deep: Path, as_user: tuple[int, int]
    ) -> None:
        os.chown(self.keep_branches(deep.parent), *as_user)
        assert base_around(deep) == deep

    def test_a_store_that_cannot_be_read_does_not_count(
        self, deep: Path, as_user: tuple[int, int]
    ) -> None:
        """Asked in a process of an ordinary user: root can read everything."""
        self.keep_branches(deep.parent).chmod(0o700)
        script = (
            "import os, sys; from pathlib import Path\n"
            "from branching.fs.automount import base_around\n"
            f"os.setgid({as_user[1]}); os.setuid({as_user[0]})\n"
            "print(base_around(Path(sys.argv[1])))"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, str(deep)], capture_output=True, text=True, check=False
        )
        assert (done.stdout.rstrip("\n"), done.stderr) == (str(deep), "")

    def test_the_search_does_not_pass_the_home_directory(
        self, deep: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.keep_branches(deep.parents[1])
        monkeypatch.setenv("HOME", str(deep.parent))
        assert base_around(deep) == deep
        self.keep_branches(deep.parent)
        assert base_around(deep) == deep.parent

    def test_the_search_does_not_leave_the_file_system(self, deep: Path, base: Path) -> None:
        self.keep_branches(deep.parent)
        with mounted(base, deep) as point:
            assert base_around(point) == point


class TestNamedDirectory:
    """A directory that is named is the workspace, whatever is kept above it."""

    @pytest.fixture
    def inner(self, base: Path) -> Path:
        assert branching(base, "run", "-b", "kept", "--on-success", "keep", "--", "true").code == 0
        path = base / "inner"
        path.mkdir()
        return path

    def test_the_option_means_that_directory(self, inner: Path) -> None:
        done = branching(
            inner, "run", "-q", "-w", str(inner), "--", "sh", "-c", "pwd; echo x >made"
        )
        assert (done.code, done.out) == (0, f"{inner}\n"), done.err
        assert (inner / "made").exists()

    def test_open_means_that_directory(self, inner: Path) -> None:
        with Workspace.open(inner) as workspace:
            assert workspace.base == inner
            assert workspace.branches() == []

    def test_without_the_option_the_workspace_above_is_used_and_named(self, inner: Path) -> None:
        done = branching(inner, "ls")
        assert done.out.startswith("kept ")
        assert done.err == f"workspace: {inner.parent} (above the current directory)\n"
        done = branching(inner, "ls", "--json")
        assert [entry["name"] for entry in done.document["branches"]] == ["kept"]
        assert done.err == ""


class TestNoAnswer:
    """A daemon that is stopped accepts connections, and answers nothing."""

    @pytest.fixture
    def stopped(self, place: Path) -> Iterator[Path]:
        (other := place / "other").mkdir()
        with mounted(other, place / "stopped") as point:
            daemon = int(Path(os.fsdecode(os.getxattr(point, CONTROL_XATTR))).stem)
            os.kill(daemon, signal.SIGSTOP)
            try:
                yield point
            finally:
                os.kill(daemon, signal.SIGCONT)

    def test_it_does_not_hinder_work_in_another_directory(self, base: Path, stopped: Path) -> None:
        done = branching(base, "run", "-q", "--", "sh", "-c", "echo x >made")
        assert done.code == 0, done.err
        assert (base / "made").exists()
        assert stopped in [mount.directory for mount in read_mounts()]

    def test_its_own_directory_and_mount_name_it(
        self, stopped: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(branchfs, "ANSWER_SECONDS_MAX", 0.2)
        failure = f"the BranchFS daemon of {stopped} does not answer"
        with pytest.raises(MountError, match=failure) as caught:
            Workspace.open(stopped.parent / "other")
        assert "umount -l" in (caught.value.hint or "")
        with pytest.raises(MountError, match=failure):
            Workspace(stopped)


class TestMount:
    @pytest.mark.contract("2.19")
    def test_it_takes_the_options_of_the_published_package(self, base: Path, place: Path) -> None:
        with Workspace.mount(
            base, mountpoint=place / "here", storage=place / "store", branchfs_bin=find_program()
        ) as workspace:
            assert workspace.path == place / "here"
            assert workspace.store == place / "store"
            with workspace.branch("b") as branch:
                (branch.path / "made").write_text("x")
        assert (base / "made").exists()
        assert not (base / ".branching").exists()
        assert not (place / "here").is_mount()

    @pytest.mark.parametrize(
        ("driver", "fstype"), [("fuse", "branchfs"), ("overlay", "overlay"), ("auto", "overlay")]
    )
    def test_the_driver_is_chosen(self, base: Path, driver: Driver, fstype: str) -> None:
        with Workspace.mount(base, driver=driver) as workspace:
            assert workspace.fstype == fstype

    @pytest.mark.contract("2.19")
    def test_it_mounts_in_a_directory_of_its_own(self, base: Path) -> None:
        """`.close()` unmounts."""
        workspace = Workspace.mount(base)
        point = workspace.path
        assert point.is_mount()
        workspace.close()
        assert not point.exists()

    @pytest.mark.contract("2.19")
    def test_failures_are_mount_errors_and_leave_nothing(self, base: Path, place: Path) -> None:
        with pytest.raises(MountError, match="is not a directory"):
            Workspace.mount(place / "nowhere")
        with Workspace.mount(base), pytest.raises(MountError, match="in use by another mount"):
            Workspace.mount(base)
        with pytest.raises(MountError, match="there is no program"):
            Workspace.mount(base, branchfs_bin="/no/such")

    def test_a_mount_that_cannot_be_locked_is_unmounted_and_the_reason_is_raised(
        self, base: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = mounts_of_ours()

        def refuse(point: Path) -> int | None:
            raise MountError(f"{point} cannot be used: No locks available")

        with monkeypatch.context() as patch:
            patch.setattr(automount, "_lease", refuse)
            with pytest.raises(MountError, match="No locks available"):
                Workspace.mount(base)
        assert mounts_of_ours() == before

    def test_a_mount_in_use_is_reported_and_can_be_closed_later(
        self, base: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(automount, "BUSY_SECONDS_MAX", 0.1)
        workspace = Workspace.mount(base)
        with (workspace.path / "seed.txt").open(), pytest.raises(MountError, match="in use"):
            workspace.close()
        workspace.close()
        assert not workspace.path.exists()


class TestCommand:
    def test_it_works_in_any_directory(self, base: Path) -> None:
        done = branching(base, "run", "--", "sh", "-c", "cat seed.txt; echo x > made")
        assert done.code == 0, done.err
        assert done.out.startswith("seed\n")
        assert (base / "made").read_text() == "x\n"

    def test_a_kept_branch_is_found_by_the_next(self, base: Path) -> None:
        """Also from a directory below."""
        (base / "deep").mkdir()
        words = ["run", "-b", "kept", "--on-success", "keep", "--", "touch", "made"]
        assert branching(base, *words).code == 0
        [entry] = branching(base / "deep", "ls", "--json").document["branches"]
        assert entry["name"] == "kept"
        assert branching(base / "deep", "abort", "kept").code == 0

    def test_two_commands_that_change_nothing_both_succeed(self, base: Path) -> None:
        """They share the mount that the first makes, whichever ends first."""
        for _ in range(2):
            pair = [
                Running(base, ["run", "-q", "--", "sleep", seconds]) for seconds in ("0.1", "0")
            ]
            assert [(run.done().code, run.done().err) for run in pair] == [(0, "")] * 2

    def test_the_state_of_forks_goes_with_the_store(self, base: Path) -> None:
        """A store without kept branches is removed as a whole."""
        for _ in range(2):
            with Workspace.open(base) as workspace:
                SQLiteForkStateStore.beside(workspace).close()
            assert not (base / ".branching").exists()

    def test_a_run_that_fails_leaves_nothing(self, base: Path) -> None:
        assert branching(base, "run", "--", "sh", "-c", "echo why; exit 3").code == 3
        assert not (base / ".branching").exists()

    def test_output_of_failed_candidates_is_kept(self, base: Path) -> None:
        for _ in range(2):
            assert branching(base, "speculate", "-c", "echo why; exit 3").code == 1
        first, second = branching(base, "log", "--json").document["candidates"]
        for entry in (first, second):
            assert branching(base, "log", entry["branch"]).out == "why\n"
        assert branching(base, "prune").code == 0
        assert branching(base, "log").out == ""
        assert not (base / ".branching").exists()

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_unmounts_too(self, base: Path, number: signal.Signals) -> None:
        before = mounts_of_ours()
        run = Running(base, ["speculate", "-c", "echo up; sleep 60"])
        run.wait_for_line("up")
        run.signal(number)
        assert run.done().code == 128 + number
        assert mounts_of_ours() == before

    def test_ctrl_c_at_any_moment_leaves_nothing(self, base: Path) -> None:
        """Ever later, until it comes after the end."""
        before = mounts_of_ours()
        script = (
            "import sys\n"
            "from branching.__main__ import main\n"
            "print('up', file=sys.stderr, flush=True)\n"
            "main()"
        )
        words = [sys.executable, "-c", script, "run", "--", "sleep"]
        codes: list[int] = []
        while 0 not in codes:
            # The first one would last: a signal ends it for certain.
            run = Running(base, words=[], argv=[*words, "0.1" if codes else "600"])
            run.wait_for_line("up")
            threading.Event().wait(0.02 * 1.6 ** len(codes))
            run.signal(signal.SIGINT)
            done = run.done()
            codes.append(done.code)
            assert done.code in (0, 130, -signal.SIGINT), done.err
            assert mounts_of_ours() == before, codes
        with Workspace.open(base) as workspace:
            assert workspace.branches() == []

    def test_commands_see_the_directory_at_its_own_path(self, base: Path) -> None:
        """The path of the mount differs each time, and caches contain paths."""
        done = branching(base, "run", "--", "sh", "-c", 'echo "$BRANCHING_WORKSPACE"')
        assert done.out.splitlines()[0] == str(base)
        with mounted(base, base.parent / "mount") as point:
            done = branching(base, "run", "--", "sh", "-c", 'echo "$BRANCHING_WORKSPACE"')
            assert done.out.splitlines()[0] == str(point)


class TestPlaces:
    """A project can lie anywhere: each command works in it at its own path."""

    def test_a_project_outside_of_tmp_is_written_in(self, outside: Path) -> None:
        done = branching(outside, "run", "--", "sh", "-c", "pwd && echo x > made && ls -A")
        assert done.out.splitlines()[:2] == [str(outside), "made"], done.err
        assert (outside / "made").read_text() == "x\n"


@pytest.mark.parametrize("driver", ["real", "overlaid"])
def test_in_a_sandbox_it_is_said_that_nothing_can_be_branched(
    request: pytest.FixtureRequest, driver: str
) -> None:
    """With both drivers: nothing in the mount of an overlay branch names BranchFS."""
    root: Path = request.getfixturevalue(driver).root
    done = branching(root, "run", "--no-log", "--", sys.executable, "-m", "branching", "ls")
    assert done.code == 125
    assert "this process is in its sandbox: branches cannot be created" in done.err
