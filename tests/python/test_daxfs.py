"""DaxFS without its kernel module: what the mount table says, and what is refused before any call.

All else is tested in the virtual machine that has the module: tests/vm/test_daxfs.py.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from branching import BranchError, BranchNotFoundError, CommitError, MountError, Workspace
from branching._linux import mountinfo, syscalls
from branching.agent.parent_workspace import ParentWorkspace
from branching.cli import doctor
from branching.fs import daxfs
from branching.fs.branch import Branch
from branching.mcp.workspace_session import WorkspaceSession


class FakeKernel:
    """A mount table to write lines to. Any call that would change it fails the test."""

    def __init__(self, table: Path, root: Path) -> None:
        self.table = table
        self.root = root

    def show(self, point: Path, source: str, options: str, flags: str = "rw") -> None:
        escaped = [word.replace(" ", r"\040") for word in (str(point), source)]
        with self.table.open("a") as file:
            file.write(f"90 1 0:99 / {escaped[0]} {flags} - daxfs {escaped[1]} {options}\n")


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    root = tmp_path / "the root"
    root.mkdir()
    table = tmp_path / "mountinfo"
    table.write_bytes(b"")
    monkeypatch.setattr(mountinfo, "MOUNT_TABLE", table)
    monkeypatch.setattr(daxfs, "STORES", tmp_path / "stores")

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the kernel was called")

    for name in ("new_mount", "attach_mount", "reconfigure", "unmount"):
        monkeypatch.setattr(syscalls, name, never)
    return FakeKernel(table, root)


@pytest.fixture
def space(kernel: FakeKernel) -> Workspace:
    kernel.show(kernel.root, "none", "ro,source=dmabuf,size=4096,branch=/main", "ro,nosuid")
    return Workspace(kernel.root)


def shown_branch(kernel: FakeKernel, space: Workspace, name: str, branch: str) -> Path:
    assert space.store is not None
    point = space.store / "1700000000000000000" / name
    point.mkdir(parents=True)
    kernel.show(point, str(kernel.root), f"rw,source=dmabuf,size=4096,branch={branch}")
    return point


def test_branches_are_what_the_mount_table_says(kernel: FakeKernel, space: Workspace) -> None:
    point = shown_branch(kernel, space, "a b,c", "/main/a b,c")
    shown_branch(kernel, space, "committed", "/main")
    kernel.show(kernel.root.parent / "elsewhere", "none", "rw,size=1,branch=/main/other")
    [record] = space.branches()
    assert (record.name, record.path, record.branch_path) == ("a b,c", point, "/main/a b,c")
    assert (record.id, record.created, record.state) == (1700000000000000000, 1.7e9, "live")


def test_the_options_of_a_mount_are_read(kernel: FakeKernel, space: Workspace) -> None:
    [mount] = mountinfo.read_mounts()
    assert (mount.directory, mount.options) == (kernel.root, frozenset({"ro", "nosuid"}))
    assert mount.super_options == "ro,source=dmabuf,size=4096,branch=/main"
    assert (space.fstype, space.owner) == ("daxfs", (os.geteuid(), os.getegid()))


def test_a_branch_leads_to_its_main(kernel: FakeKernel, space: Workspace) -> None:
    point = shown_branch(kernel, space, "a", "/main/a")
    inner = Workspace(point)
    assert (inner.root, inner.path, inner.branch_path) == (kernel.root, point, "/main/a")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("ro,size=1,static", "not inside a mount that can be branched"),
        ("rw,size=1,branch=/main/a", "main branch is not known"),
    ],
)
def test_a_mount_without_its_main_cannot_be_opened(
    kernel: FakeKernel, options: str, words: str
) -> None:
    kernel.show(kernel.root, "none", options)
    with pytest.raises(MountError, match=words) as caught:
        Workspace(kernel.root)
    assert caught.value.hint


CALLS: list[tuple[str, type[Exception], Callable[[Workspace, Branch], object]]] = [
    ("nested", MountError, lambda space, branch: branch.branch("b").__enter__()),
    ("disk", MountError, lambda space, branch: space.branch("b", disk_limit=1).__enter__()),
    ("31 bytes", MountError, lambda space, branch: space.branch("é" * 16).__enter__()),
    ("part", CommitError, lambda space, branch: branch.commit(only=["a"])),
    ("snapshot", CommitError, lambda space, branch: branch.commit(policy="snapshot")),
    ("rebase", CommitError, lambda space, branch: branch.rebase()),
    ("changes", BranchError, lambda space, branch: branch.diff()),
    ("history", CommitError, lambda space, branch: space.undo()),
    ("nested", MountError, lambda space, branch: space.check_call(is_nested=True)),
    ("part", MountError, lambda space, branch: space.check_call(is_part=True)),
    ("agents", MountError, lambda space, branch: ParentWorkspace(space)),
    ("mcp", MountError, lambda space, branch: WorkspaceSession(space)),
]


@pytest.mark.parametrize(("words", "kind", "call"), CALLS, ids=[str(i) for i in range(len(CALLS))])
def test_it_is_refused_before_the_kernel_is_called(
    kernel: FakeKernel,
    space: Workspace,
    words: str,
    kind: type[Exception],
    call: Callable[[Workspace, Branch], object],
) -> None:
    shown_branch(kernel, space, "a", "/main/a")
    with pytest.raises(kind, match=words) as caught:
        call(space, space.reopen("a"))
    assert getattr(caught.value, "hint", None)


def is_locked(directory: Path) -> bool:
    lock = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def test_other_programs_wait_while_the_kernel_makes_commits_or_drops_a_branch(
    kernel: FakeKernel, space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module does not lock its table of branches, which all mounts share."""
    calls = []

    def called(name: str) -> Callable[..., int]:
        def call(*_: object, **__: object) -> int:
            assert space.store is not None
            calls.append((name, is_locked(space.store)))
            return os.open("/", os.O_RDONLY) if name == "new_mount" else 0

        return call

    for name in ("new_mount", "attach_mount"):
        monkeypatch.setattr(syscalls, name, called(name))
    monkeypatch.setattr(daxfs, "_memory_of", lambda _: nullcontext({}))
    space.branch("made", None, None).__enter__()
    point = shown_branch(kernel, space, "a", "/main/a")
    for name in ("reconfigure", "unmount"):
        monkeypatch.setattr(syscalls, name, called(name))
    space.reopen("a").commit()
    kernel.show(point, str(kernel.root), "rw,branch=/main/a")
    point.mkdir(parents=True)
    space.reopen("a").abort()
    made, remounted = ["new_mount", "attach_mount"], ["new_mount", "attach_mount", "unmount"]
    assert [name for name, _ in calls] == [*made, "reconfigure", "unmount", *remounted, "unmount"]
    assert all(was_locked for _, was_locked in calls)


def test_a_branch_that_another_program_ended_is_not_found(
    kernel: FakeKernel, space: Workspace
) -> None:
    point = shown_branch(kernel, space, "a", "/main/a")
    branch = space.reopen("a")
    point.rmdir()
    with pytest.raises(BranchNotFoundError, match="no longer open"):
        branch.commit()


def test_without_root_the_reason_is_reported(
    space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(daxfs.DaxFS, "_mount", denied)
    with pytest.raises(MountError, match="not permitted") as caught:
        space.branch("a").__enter__()
    assert "only root" in str(caught.value)
    assert space.store is not None
    assert list(space.store.iterdir()) == []


def test_the_doctor_says_whether_the_module_is_loaded(
    kernel: FakeKernel, space: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = tmp_path / "filesystems"
    monkeypatch.setattr(doctor, "FILE_SYSTEMS", listed)
    listed.write_text("nodev\tproc\n\text4\n")
    assert "not loaded" in doctor._daxfs()
    listed.write_text("nodev\tproc\nnodev\tdaxfs\n")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert doctor._daxfs() == f"the module is loaded (experimental); mounted: {kernel.root}"
