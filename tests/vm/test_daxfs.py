"""What is DaxFS's own: run by tests/vm/daxfs, in the virtual machine that has the module."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from branching import (
    BeamSearch,
    BestOfN,
    BranchContext,
    BranchError,
    BranchingError,
    BranchStaleError,
    Cascaded,
    CommitError,
    ConflictError,
    MountError,
    RecoveryError,
    Reflexion,
    ResourceLimits,
    Speculate,
    Tournament,
    TreeOfThoughts,
    Workspace,
)
from branching._linux.mountinfo import read_mounts

MIB = 1 << 20


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def write(path: Path, *_: object) -> bool:
    (path / "new").write_text(f"{path}\n")
    return True


def refuse(path: Path, *_: object) -> bool:
    write(path)
    return False


def command(space: Workspace, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "branching", *words],
        capture_output=True,
        text=True,
        cwd=space.root,
        check=False,
    )


def test_the_mount_is_detected(space: Workspace) -> None:
    assert (space.fstype, space.base, space.policy) == ("daxfs", space.root, "first-winner")


def test_a_commit_reaches_main_and_an_abort_does_not(space: Workspace) -> None:
    with space.branch("kept") as branch:
        (branch.path / "new").write_text("new\n")
        (branch.path / "seed.txt").write_text("changed\n")
        assert not (space.root / "new").exists()
    assert (space.root / "new").read_text() == "new\n"
    assert (space.root / "seed.txt").read_text() == "changed\n"
    with pytest.raises(RuntimeError), space.branch("dropped") as branch:
        (branch.path / "other").write_text("x")
        raise RuntimeError
    assert names(space.root) == ["new", "seed.txt"]


def test_commits_follow_each_other(space: Workspace) -> None:
    for number in range(5):
        with space.branch(f"step-{number}") as branch:
            assert len(names(branch.path)) == number + 1
            (branch.path / f"new-{number}").write_text(f"{number}\n")
    found = [(space.root / f"new-{number}").read_text() for number in range(5)]
    assert found == [f"{number}\n" for number in range(5)]


def test_main_stays_mounted_once_and_read_only(space: Workspace) -> None:
    flags = [mount.options for mount in read_mounts() if mount.directory == space.root]
    with space.branch("a") as branch:
        write(branch.path)
    after = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    points = [words[4].replace(r"\040", " ") for words in after if "daxfs" in words]
    assert points == [str(space.root)]
    assert [mount.options for mount in read_mounts() if mount.directory == space.root] == flags
    with pytest.raises(OSError, match="Read-only"):
        (space.root / "new").write_text("no")


def test_siblings_are_stale_after_a_commit_also_in_open_files(space: Workspace) -> None:
    loser = space.branch("loser", on_success=None).__enter__()
    with (loser.path / "seed.txt").open("r+b", buffering=0) as file:
        with space.branch("winner") as winner:
            write(winner.path)
        assert loser.is_stale()
        assert [each.state for each in space.branches()] == ["stale"]
        for use in (file.read, lambda: file.write(b"x"), lambda: names(loser.path)):
            with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
                use()
    with pytest.raises(ConflictError, match="sibling"):
        loser.commit()
    loser.abort()


def test_a_stale_file_in_a_with_ends_as_a_stale_branch(space: Workspace) -> None:
    with pytest.raises(BranchStaleError, match="loser") as caught, space.branch("loser") as loser:
        with space.branch("winner") as winner:
            write(winner.path)
        names(loser.path)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_file_open_for_writing_keeps_a_commit_from_starting(
    space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor that outlived the commit would write into main."""
    monkeypatch.setattr("branching.fs.daxfs.BUSY_SECONDS_MAX", 0.1)
    branch = space.branch("busy", on_success=None).__enter__()
    with (branch.path / "seed.txt").open("a"):
        with pytest.raises(CommitError, match="open for writing"):
            branch.commit()
        assert (branch.path / "seed.txt").read_text() == "seed\n"
    branch.commit()


def test_a_path_in_a_branch_leads_to_the_branch(space: Workspace) -> None:
    with space.branch("a", on_success=None) as branch:
        with Workspace(branch.path) as inner:
            assert (inner.root, inner.path) == (space.root, branch.path)
            assert inner.branch_path == "/main/a"
            with pytest.raises(MountError, match="nested"):
                inner.branch("b").__enter__()
        branch.abort()


@pytest.mark.parametrize(
    "pattern",
    [
        Speculate([refuse, write]),
        BestOfN(write, 3),
        Reflexion(write),
        TreeOfThoughts([refuse, write]),
        BeamSearch([refuse, write], expand=lambda *_: [], max_depth=1),
        Tournament(write, 3, judge=lambda *_: 0),
        Cascaded(write, fan_out=(1, 2)),
        BestOfN(write, 2, resource_limits=ResourceLimits(memory=200 * MIB)),
    ],
    ids=lambda pattern: type(pattern).__name__,
)
def test_the_patterns_commit_one_winner(
    space: Workspace, pattern: Callable[[Workspace], object]
) -> None:
    pattern(space)
    assert names(space.root) == ["new", "seed.txt"]
    assert space.branches() == []


@pytest.mark.parametrize(
    "pattern",
    [
        BeamSearch([write], expand=lambda *_: [write], max_depth=2),
        TreeOfThoughts([write], expand=lambda *_: [write], max_depth=2),
        BestOfN(write, 2, setup=write),
        BestOfN(write, 2, group_limits=ResourceLimits(disk=MIB)),
        BestOfN(write, 2, resource_limits=ResourceLimits(disk=MIB)),
        BestOfN(write, 2, only=["new"]),
    ],
    ids=["beams", "thoughts", "setup", "disk together", "disk each", "only"],
)
def test_a_call_that_cannot_succeed_is_refused_before_anything_starts(
    space: Workspace, pattern: Callable[[Workspace], object]
) -> None:
    def told(*_: object) -> None:
        raise AssertionError("something was started")

    pattern._on_event = told  # type: ignore[attr-defined]
    with pytest.raises(MountError, match="DaxFS has no") as caught:
        pattern(space)
    assert caught.value.hint
    assert (names(space.root), space.branches()) == (["seed.txt"], [])


def test_operations_that_daxfs_lacks_are_refused_by_name(space: Workspace) -> None:
    branch = space.branch("a", on_success=None).__enter__()
    write(branch.path)
    file = (branch.path.parent / "archive").open("w+b")
    calls: list[tuple[Callable[[], object], type[BranchingError], str]] = [
        (branch.diff, BranchError, "changes"),
        (lambda: branch.patch(file), BranchError, "changes"),
        (lambda: branch.export(file), BranchError, "export"),
        (lambda: space.load("b", file), MountError, "import"),
        (space.history, MountError, "history"),
        (space.undo, CommitError, "history"),
        (space.redo, CommitError, "history"),
        (space.prune, MountError, "history"),
        (branch.rebase, CommitError, "rebase"),
        (branch.branch("b").__enter__, MountError, "nested"),
        (space.branch("b", disk_limit=MIB).__enter__, MountError, "disk"),
        (space.branch("b" * 32).__enter__, MountError, "31 bytes"),
        (lambda: branch.commit(only=["new"]), CommitError, "part"),
        (lambda: branch.commit(skip=True), CommitError, "part"),
        (lambda: branch.commit(policy="snapshot"), CommitError, "snapshot"),
        (lambda: branch.commit(rebase=True), CommitError, "rebase"),
        (lambda: branch.commit(dry_run=True), CommitError, "dry run"),
        (lambda: Workspace.open(space.root, policy="snapshot"), MountError, "policy"),
        (lambda: Workspace.open(space.root, driver="overlay"), MountError, "driver"),
    ]
    with file:
        for call, kind, words in calls:
            with pytest.raises(kind, match=words) as caught:
                call()
            assert type(caught.value) is kind
            assert caught.value.hint
    (branch.path.parent / "archive").unlink()
    assert [each.name for each in space.branches()] == ["a"]
    branch.abort()
    assert names(space.root) == ["seed.txt"]


def test_hard_links_are_refused_by_the_kernel(space: Workspace) -> None:
    with space.branch("a", on_success=None) as branch:
        with pytest.raises(PermissionError):
            (branch.path / "link").hardlink_to(branch.path / "seed.txt")
        branch.abort()


def test_a_name_is_free_again_after_an_abort_and_taken_before(space: Workspace) -> None:
    first = space.branch("a", on_success=None).__enter__()
    with pytest.raises(BranchError, match="open"):
        space.branch("a").__enter__()
    first.abort()
    second = space.branch("a", on_success=None).__enter__()
    assert second.inspect().id != first._opened().id
    second.abort()


def test_a_commit_that_does_not_fit_leaves_main_as_it_was(space: Workspace) -> None:
    with space.branch("first") as branch:
        (branch.path / "first").write_bytes(bytes(700_000))
    second = space.branch("second", on_success=None).__enter__()
    (second.path / "second").write_bytes(bytes(700_000))
    with pytest.raises(CommitError, match="do not fit"):
        second.commit()
    second.abort()
    assert names(space.root) == ["first", "seed.txt"]


@pytest.mark.parametrize(
    ("change", "paths"),
    [
        (lambda top: renamed(top / "new", top / "other"), ("new",)),
        (lambda top: renamed(top / "new", top / "seed.txt"), ("new",)),
        (lambda top: overwrite(top / "seed.txt", b"S"), ("seed.txt",)),
        (lambda top: (top / "earlier").unlink(), ("earlier",)),
    ],
    ids=[
        "renamed",
        "replaced by renaming",
        "overwritten in part",
        "removed after an earlier commit",
    ],
)
def test_changes_that_a_commit_loses_are_named(
    space: Workspace, change: Callable[[Path], object], paths: tuple[str, ...]
) -> None:
    with space.branch("first") as first:
        (first.path / "earlier").write_text("earlier\n")
    branch = space.branch("second", on_success=None).__enter__()
    change(branch.path)
    with pytest.raises(RecoveryError, match="DaxFS lost changes") as caught:
        branch.commit()
    assert caught.value.paths == paths
    assert (space.branches(), branch.is_open) == ([], False)


def test_renamed_files_of_the_image_keep_their_names(space: Workspace) -> None:
    """Without an error: docs/daxfs.md warns of it."""
    with space.branch("a") as branch:
        (branch.path / "seed.txt").rename(branch.path / "renamed")
    assert names(space.root) == ["seed.txt"]


def renamed(path: Path, target: Path) -> None:
    path.write_text("new\n")
    path.rename(target)


def overwrite(path: Path, data: bytes) -> None:
    with path.open("r+b") as file:
        file.write(data)


def test_changes_that_a_commit_keeps(space: Workspace) -> None:
    with space.branch("a") as branch:
        (branch.path / "directory").mkdir()
        (branch.path / "directory" / "file").write_text("x" * 10_000)
        (branch.path / "link").symlink_to("seed.txt")
        with (branch.path / "seed.txt").open("a") as file:
            file.write("appended\n")
    with space.branch("b") as branch:
        (branch.path / "seed.txt").chmod(0o600)
    with space.branch("c") as branch:
        (branch.path / "directory" / "file").write_text("again\n")
    assert names(space.root) == ["directory", "link", "seed.txt"]
    assert (space.root / "link").read_text() == "seed\nappended\n"
    assert (space.root / "seed.txt").stat().st_mode & 0o777 == 0o600
    assert (space.root / "directory" / "file").read_text() == "again\n"
    with space.branch("d") as branch:
        (branch.path / "seed.txt").unlink()
    assert names(space.root) == ["directory", "link"]


def test_a_sandbox_shows_the_branch_at_the_path_of_main(space: Workspace) -> None:
    with space.branch("a") as branch, space.branch("b", on_success=None) as other:
        script = "pwd; cat /proc/self/mountinfo >mounts; ls /run >run; echo yes >made"
        read, written = os.pipe()
        with BranchContext(["sh", "-c", script], branch, stdout=written) as context:
            context.wait()
        os.close(written)
        with os.fdopen(read) as output:
            assert output.read() == f"{space.root}\n"
        table = (branch.path / "mounts").read_text()
        assert (table.count(" - daxfs "), "/main/b" in table) == (1, False)
        assert (branch.path / "run").read_text() == ""
        other.abort()
    assert (space.root / "made").read_text() == "yes\n"


def test_branches_of_a_killed_program_are_dropped(space: Workspace) -> None:
    script = (
        "import os, sys; from branching import Workspace;"
        "Workspace(sys.argv[1]).branch('left').__enter__(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script, space.root], check=False)
    assert [each.name for each in space.branches()] == ["left"]
    with Workspace(space.root) as again:
        assert again.dropped == ["left"]


def test_the_commands(space: Workspace) -> None:
    ran = command(space, "run", "--", "sh", "-c", "echo yes >made; pwd")
    assert (ran.returncode, ran.stdout) == (0, f"{space.root}\n")
    assert (space.root / "made").read_text() == "yes\n"
    best = command(space, "best-of-n", "-n", "2", "--", "sh", "-c", "echo best >made")
    assert (best.returncode, (space.root / "made").read_text()) == (0, "best\n")
    status = command(space, "status")
    assert "fstype: daxfs\n" in status.stdout
    assert "experimental" in status.stdout
    undo = command(space, "undo")
    assert (undo.returncode, "DaxFS has no history" in undo.stderr) == (125, True)
    checks = json.loads(command(space, "doctor", "--json").stdout)["checks"]
    [found] = [check for check in checks if check["name"] == "DaxFS"]
    assert (found["state"], str(space.root) in found["detail"]) == ("ok", True)
