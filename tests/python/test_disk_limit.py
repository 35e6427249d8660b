"""The disk limit of a branch, from Python: BranchFS enforces it, and the fake receives it."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
from conftest import Mounted

from branching import BranchNotFoundError, MountError, Workspace

MIB = 1 << 20


def test_a_branch_may_add_so_many_bytes(real_workspace: Workspace) -> None:
    with real_workspace.branch("limited", disk_limit=MIB) as branch:
        (branch.path / "fits").write_bytes(bytes(MIB // 2))
        with pytest.raises(OSError, match="quota exceeded") as caught:
            (branch.path / "too much").write_bytes(bytes(MIB))
        assert caught.value.errno == errno.EDQUOT
        (branch.path / "too much").unlink()
        record = branch.inspect()
        assert (record.disk_limit, record.disk_used) == (MIB, MIB // 2)
        assert record.disk_refusals
    assert (real_workspace.path / "fits").stat().st_size == MIB // 2


def test_a_child_has_no_more_than_its_parent(real_workspace: Workspace) -> None:
    with (
        real_workspace.branch("parent", disk_limit=MIB, on_success=None) as parent,
        parent.branch("child", disk_limit=10 * MIB) as child,
    ):
        with pytest.raises(OSError, match="quota exceeded") as caught:
            (child.path / "file").write_bytes(bytes(2 * MIB))
        assert caught.value.errno == errno.EDQUOT
        assert os.statvfs(child.path).f_bavail == 0
    assert parent.inspect().disk_used == MIB
    parent.abort()


def test_the_limit_is_reported_and_shown(workspace: Workspace) -> None:
    with workspace.branch("limited", disk_limit=MIB, on_success=None) as limited:
        (record,) = workspace.branches()
        assert (record.disk_limit, record.disk_used) == (MIB, 0)
    limited.abort()
    with pytest.raises(BranchNotFoundError, match="'limited' is gone"):
        limited.inspect()
    with workspace.branch("free", on_success=None) as free:
        assert free.inspect().disk_limit is None
        assert free.inspect().disk_used is None
    free.abort()


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), ("1M", TypeError)]
)
def test_a_limit_is_a_whole_number_above_zero(
    workspace: Workspace, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match="disk_limit must be"):
        workspace.branch("branch", disk_limit=value)


def test_a_daemon_that_cannot_limit_is_not_asked_to(
    faked: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert faked.fake is not None
    info = faked.fake._info()
    monkeypatch.setattr(faked.fake, "_info", lambda: info | {"features": []})
    space = Workspace(faked.root)
    with pytest.raises(MountError, match="the limit on disk cannot be enforced") as caught:
        space.branch("branch", disk_limit=MIB).__enter__()
    assert (caught.value.limit, space.branches()) == ("disk", [])
    space.close()
