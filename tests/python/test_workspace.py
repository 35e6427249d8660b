"""Workspaces and branches, on the fake and on the real mount."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from conftest import NAME_FROM, Mounted

from branching import (
    BranchError,
    BranchingError,
    BranchNotFoundError,
    BranchStaleError,
    ConflictError,
    MountError,
    Workspace,
)

SEED = "seed\n"
_FIXTURES = {"fake": "faked", "branchfs": "real", "overlay": "overlaid"}


@pytest.fixture(params=list(_FIXTURES))
def mount(request: pytest.FixtureRequest) -> Mounted:
    """A mount of each backend in turn, and of the overlay driver."""
    found: Mounted = request.getfixturevalue(_FIXTURES[request.param])
    return found


@pytest.mark.contract("0.6", "2.1", "2.4")
def test_the_backend_is_found_by_itself(mount: Mounted) -> None:
    workspace = Workspace(mount.root)
    assert workspace.path == mount.root
    assert workspace.fstype == ("overlay" if mount.backend == "overlay" else "branchfs")
    assert Workspace(str(mount.root)).path == mount.root


@pytest.mark.contract("2.2")
def test_a_path_deep_inside_the_mount_opens_the_workspace(
    workspace: Workspace,
) -> None:
    (workspace.path / "deep" / "down").mkdir(parents=True)
    assert Workspace(workspace.path / "deep" / "down").path == workspace.path


@pytest.mark.contract("2.2", "2.9")
def test_a_workspace_opened_in_a_branch_stands_for_that_branch(workspace: Workspace) -> None:
    """A candidate that forks gets the result into its own branch."""
    with workspace.branch("outer") as outer, workspace.branch("sibling") as sibling:
        (outer.path / "deep").mkdir()
        inside = Workspace(outer.path / "deep")
        assert (inside.path, inside.root) == (outer.path, workspace.path)
        assert inside.branch_path == "/main/outer"
        with inside.branch("inner") as inner:
            assert inner.branch_path == "/main/outer/inner"
            assert Workspace(inner.path).branch_path == "/main/outer/inner"
            (inner.path / "new").write_text("new")
        assert (outer.path / "new").exists()
        assert not (workspace.path / "new").exists()
        assert not sibling.is_stale()
        inside.close()
        sibling.abort()
    assert (workspace.path / "new").exists()


def test_a_workspace_in_a_dropped_branch_is_not_found(workspace: Workspace) -> None:
    with pytest.raises(BranchNotFoundError, match="not in an open branch"):
        Workspace(workspace.path / "@gone" / "file")


@pytest.mark.contract("2.3")
def test_a_path_outside_any_mount_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(MountError, match="not inside a mount") as caught:
        Workspace(tmp_path)
    assert isinstance(caught.value, BranchingError)
    assert caught.value.hint
    assert caught.value.path == str(tmp_path)


@pytest.mark.contract("2.5", "2.7", "2.12", "2.13")
def test_a_clean_exit_commits(workspace: Workspace) -> None:
    with workspace.branch("work") as branch:
        (branch.path / "new").write_text("new")
        (branch.path / NAME_FROM).write_text("changed")
        assert not (workspace.path / "new").exists()
        assert (workspace.path / NAME_FROM).read_text() == SEED
    assert (workspace.path / "new").read_text() == "new"
    assert (workspace.path / NAME_FROM).read_text() == "changed"
    assert not branch.is_open


@pytest.mark.contract("2.7", "2.13")
def test_an_exception_aborts_and_propagates(workspace: Workspace) -> None:
    with (
        pytest.raises(ZeroDivisionError, match="mine"),
        workspace.branch("work") as branch,
    ):
        (branch.path / "new").write_text("new")
        raise ZeroDivisionError("mine")
    assert not (workspace.path / "new").exists()
    assert workspace.branches() == []


@pytest.mark.contract("2.6", "2.8")
def test_none_leaves_the_branch_open(workspace: Workspace) -> None:
    with workspace.branch("kept", on_success=None) as kept:
        (kept.path / "new").write_text("new")
    with (
        pytest.raises(RuntimeError),
        workspace.branch("broken", on_error=None) as broken,
    ):
        raise RuntimeError
    assert [record.name for record in workspace.branches()] == ["kept", "broken"]
    assert (kept.path / "new").read_text() == "new"
    assert not (workspace.path / "new").exists()
    broken.abort()
    kept.commit()
    assert (workspace.path / "new").exists()


@pytest.mark.contract("2.6")
@pytest.mark.parametrize(
    "options",
    [{"on_success": "abort"}, {"on_error": "commit"}, {"on_success": "keep"}, {"on_error": True}],
    ids=str,
)
def test_other_ends_are_refused(workspace: Workspace, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        workspace.branch("work", **options)


@pytest.mark.contract("2.11")
def test_a_branch_is_made_by_with_and_not_before(workspace: Workspace) -> None:
    branch = workspace.branch("work")
    assert workspace.branches() == []
    assert branch.name == "work"
    assert branch.branch_path == "/main/work"
    for use in (lambda: branch.path, branch.commit, branch.abort, lambda: branch.branch("x")):
        with pytest.raises(BranchError, match="not open yet"):
            use()
    with branch:
        assert [record.name for record in workspace.branches()] == ["work"]
        assert branch.path.is_dir()
        with pytest.raises(BranchError, match="opened before"), branch:
            pass  # pragma: no cover


def test_a_branch_is_shown_with_its_state(workspace: Workspace) -> None:
    branch = workspace.branch("b")
    assert repr(branch) == "<Branch /main/b (not open yet)>"
    with branch:
        assert repr(branch) == "<Branch /main/b (open)>"
    assert repr(branch) == "<Branch /main/b (committed)>"


@pytest.mark.contract("2.9", "2.14", "2.17")
def test_the_name_is_the_name(workspace: Workspace) -> None:
    with workspace.branch("née 1") as branch:
        assert branch.path == workspace.path / "@née 1"
        assert branch.branch_path == "/main/née 1"
        assert (branch.path / NAME_FROM).read_text() == SEED


@pytest.mark.contract("0.9", "2.9", "2.12")
def test_a_child_commits_into_its_parent(workspace: Workspace) -> None:
    with workspace.branch("outer") as outer:
        (outer.path / "one").write_text("1")
        with outer.branch("inner") as inner:
            assert inner.branch_path == "/main/outer/inner"
            assert (inner.path / "one").read_text() == "1"
            (inner.path / "two").write_text("2")
        assert (outer.path / "two").read_text() == "2"
        assert not (workspace.path / "two").exists()
    assert (workspace.path / "two").read_text() == "2"


@pytest.mark.contract("2.10")
def test_ending_twice_does_nothing(workspace: Workspace) -> None:
    with workspace.branch("by-hand") as branch:
        (branch.path / "new").write_text("new")
        branch.commit()
        branch.commit()
        branch.abort()
    assert (workspace.path / "new").exists()
    with workspace.branch("by-hand") as branch:
        (branch.path / "other").write_text("new")
        branch.abort()
        branch.commit()
    assert not (workspace.path / "other").exists()


@pytest.mark.contract("2.15", "2.16")
def test_the_first_sibling_wins_and_the_second_gets_a_conflict(workspace: Workspace) -> None:
    """The loser's changes are dropped."""
    with workspace.branch("first") as first:
        (first.path / "who").write_text("first")
        with (
            pytest.raises(ConflictError) as caught,
            workspace.branch("second") as second,
        ):
            (second.path / "who").write_text("second")
            first.commit()
            assert second.is_stale()
    assert caught.value.branch == "second"
    assert (workspace.path / "who").read_text() == "first"
    assert workspace.branches() == []


@pytest.mark.contract("2.16")
def test_a_stale_branch_has_no_files_and_no_children(workspace: Workspace) -> None:
    with workspace.branch("loser", on_success=None) as loser:
        with workspace.branch("winner") as winner:
            (winner.path / "won").touch()
        with pytest.raises(OSError, match=r"\w"):
            (loser.path / NAME_FROM).read_text()
        with pytest.raises(OSError, match=r"\w"):
            (loser.path / "new").write_text("x")
        with pytest.raises(BranchStaleError), loser.branch("child"):
            pass  # pragma: no cover
        loser.abort()


def test_a_name_can_be_open_once(workspace: Workspace) -> None:
    with workspace.branch("twin"):
        with pytest.raises(BranchError, match="twin"), workspace.branch("twin"):
            pass  # pragma: no cover
        assert [record.name for record in workspace.branches()] == ["twin"]


@pytest.mark.contract("8.6")
@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "@a", "a\nb", "a\0b", "\x7f", "é" * 128, "main", "\udcff"],
    ids=ascii,
)
def test_an_impossible_name_is_a_value_error_before_anything_is_done(
    workspace: Workspace, name: str
) -> None:
    with pytest.raises(ValueError, match="cannot be the name"):
        workspace.branch(name)


@pytest.mark.contract("8.6")
def test_a_name_as_long_as_a_directory_entry_is_possible(workspace: Workspace) -> None:
    with workspace.branch("é" * 127) as branch:
        assert branch.path.is_dir()


def test_a_child_that_is_forked_in_a_branch_leaves_it_alone(workspace: Workspace) -> None:
    """It leaves the `with` as well, by whatever it ends with."""
    with workspace.branch("b") as branch:
        (branch.path / "made").write_text("x")
        pid = os.fork()
        if pid == 0:
            try:
                branch.__exit__(SystemExit, SystemExit(0), None)
                branch.__exit__(None, None, None)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert [record.name for record in workspace.branches()] == ["b"]
    assert (workspace.path / "made").exists()


def test_changes_are_listed(workspace: Workspace) -> None:
    with workspace.branch("work") as branch:
        (branch.path / "new").write_text("new")
        (branch.path / NAME_FROM).unlink()
        assert [(change.path, change.change) for change in branch.diff()] == [
            ("new", "added"),
            (NAME_FROM, "deleted"),
        ]


def test_a_branch_that_another_program_ended_is_not_found(workspace: Workspace) -> None:
    with workspace.branch("gone", on_success=None) as branch:
        with Workspace(workspace.path).branch("other", on_success=None) as other:
            other.abort()
        workspace._backend.abort(workspace.branches()[0])
        with pytest.raises(BranchNotFoundError):
            branch.commit()
        assert branch.is_stale()
        branch.abort()  # gone is what was wanted


def test_many_threads_have_branches_concurrently(workspace: Workspace) -> None:
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            with workspace.branch(f"b{index}", on_success=None) as branch:
                (branch.path / "mine").write_text(str(index))
                assert (branch.path / "mine").read_text() == str(index)
                branch.abort()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_forked_child_has_connections_of_its_own(workspace: Workspace) -> None:
    workspace.branches()  # an idle connection to inherit
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with workspace.branch("child") as branch:
                (branch.path / "from-child").write_text("x")
            code = 0
        finally:
            os._exit(code)
    for _ in range(20):
        workspace.branches()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (workspace.path / "from-child").exists()


def test_idle_connections_of_other_programs_do_not_disturb_a_workspace(
    real_workspace: Workspace,
) -> None:
    """The daemon closes the workspace's own idle connections to make room, and they are renewed."""
    address = os.fsdecode(os.getxattr(real_workspace.root, "user.branchfs.control"))
    with real_workspace.branch("before"), ExitStack() as idle:
        for _ in range(600):
            peer = idle.enter_context(socket.socket(socket.AF_UNIX))
            peer.connect(address)
            peer.sendall(b'{"v":1,"verb":"requests"}\n')
            peer.recv(1)
        assert [branch.name for branch in real_workspace.branches()] == ["before"]
        with real_workspace.branch("beside") as branch:
            branch.abort()


def test_open_constructs_a_subclass_of_a_mounted_directory_as_its_call_does(real: Mounted) -> None:
    class Named(Workspace):
        def __init__(self, path: str | os.PathLike[str]) -> None:
            super().__init__(path)
            self.name = "mine"

    with Named.open(real.root) as space:
        assert isinstance(space, Named)
        assert space.name == "mine"
