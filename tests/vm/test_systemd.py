"""Where control groups are systemd's: a scope of our own is asked for, and limits hold in it.

Run by tests/vm/session, as root and as a user, in the virtual machine.
"""

from __future__ import annotations

import pytest
from support.groups import MIB, run

from branching import ProcessBranchError, ResourceLimits
from branching.process.cgroup import Cgroup, systemd
from branching.process.cgroup.cgroup_dir import NAME_PREFIX
from branching.process.cgroup.own_cgroup import UNIFIED, find_own
from branching.process.cgroup.v2 import LEAF

ALLOCATE = "held = bytearray(int(sys.argv[1]))"
SPIN = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
FORKS = """
import os
for count in range(50):
    try:
        if os.fork() == 0:
            sys.stdin.read()
            os._exit(0)
    except BlockingIOError:
        print(count)
        break
"""


def test_our_group_is_systemds_until_a_scope_is_asked_for() -> None:
    assert systemd.is_running()
    before = find_own()[UNIFIED].path
    assert not before.parent.name.startswith("branching-")
    with Cgroup.create(ResourceLimits(memory=64 * MIB)) as scope:
        assert scope.path.parent.suffix == ".scope"
        assert not before.is_relative_to(scope.path.parent)


def test_memory_is_limited() -> None:
    with Cgroup.create(ResourceLimits(memory=64 * MIB, oom_group=True)) as scope:
        assert run(scope, ALLOCATE, 200 * MIB)[0] == -9
        assert scope.usage().oom_kills


def test_memory_high_is_to_be_had() -> None:
    with Cgroup.create(ResourceLimits(memory_high=48 * MIB)) as scope:
        assert (scope.path / "memory.high").read_text() == f"{48 * MIB}\n"


def test_processes_are_limited() -> None:
    with Cgroup.create(ResourceLimits(pids=5)) as scope:
        assert run(scope, FORKS)[1] == "4\n"
        assert scope.usage().forks_refused


def test_all_branches_together_are_limited() -> None:
    with (
        Cgroup.create(ResourceLimits(memory=64 * MIB)) as group,
        Cgroup.create(ResourceLimits(), parent=group) as scope,
    ):
        assert run(scope, ALLOCATE, 200 * MIB)[0] == -9


def test_the_processor_is_limited_where_it_is_delegated() -> None:
    with Cgroup.create(ResourceLimits(memory=64 * MIB)) as scope:
        is_delegated = "cpu" in (scope.path.parent / "cgroup.controllers").read_text().split()
    print(f"the cpu controller is{'' if is_delegated else ' not'} delegated here")
    if not is_delegated:
        with pytest.raises(ProcessBranchError, match="cpu"):
            Cgroup.create(ResourceLimits(cpu=0.2))
        return
    with Cgroup.create(ResourceLimits(cpu=0.2)) as scope:
        assert run(scope, SPIN)[0] == 0
        throttled = scope.path / "cpu.stat"
        assert "nr_throttled 0" not in throttled.read_text().splitlines()


def test_nothing_is_left() -> None:
    with Cgroup.create(ResourceLimits(memory=64 * MIB)) as scope:
        path = scope.path
    assert [entry.name for entry in path.parent.glob(f"{NAME_PREFIX}*")] == [LEAF]
