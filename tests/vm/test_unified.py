"""What only control groups version 2 can do. Run by tests/vm/run, in the virtual machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.groups import MIB, run, start, version
from support.waiting import until

from branching import ResourceLimits
from branching.process.cgroup import Cgroup
from branching.process.cgroup.own_cgroup import UNIFIED, find_own
from branching.process.cgroup.v2 import LEAF

USER = 12345
ALLOCATE = "held = bytearray(int(sys.argv[1]))"


def test_this_is_version_2_alone() -> None:
    assert version() == 2
    assert set(find_own()) == {UNIFIED}


def test_memory_high_slows_down_and_kills_no_process() -> None:
    limits = ResourceLimits(memory=512 * MIB, memory_high=48 * MIB)
    with Cgroup.create(limits) as scope:
        child = start(scope, ALLOCATE + "; sys.stdin.readline()", 80 * MIB)
        events = scope.path / "memory.events"
        until(lambda: "high 0" not in events.read_text().splitlines(), "the limit being met")
        assert scope.usage().oom_kills == 0
        scope.kill()
        child.communicate()


def test_its_descriptor_serves_to_be_born_in() -> None:
    with Cgroup.create(ResourceLimits(pids=4)) as scope:
        assert scope.descriptor is not None
        assert Path(f"/proc/self/fd/{scope.descriptor}").readlink() == scope.path


def test_processes_in_the_callers_group_move_to_a_leaf() -> None:
    with Cgroup.create(ResourceLimits(memory=64 * MIB)) as scope:
        assert find_own()[UNIFIED].path.name == LEAF
        assert scope.path.parent == find_own()[UNIFIED].path.parent


def test_out_of_memory_the_kernel_kills_the_whole_group() -> None:
    with Cgroup.create(ResourceLimits(memory=64 * MIB, oom_group=True)) as scope:
        beside = start(scope, "import time; time.sleep(600)")
        code, _ = run(scope, ALLOCATE, 200 * MIB)
        beside.communicate()
        assert (code, beside.returncode) == (-9, -9)


AS_USER = f"""
import os
from support.groups import run
from branching import ResourceLimits
from branching.process.cgroup import Cgroup
os.setgroups([])
os.setresgid({USER}, {USER}, {USER})
os.setresuid({USER}, {USER}, {USER})
with Cgroup.create(ResourceLimits(memory=64 << 20, pids=20, cpu=0.9)) as scope:
    print(*run(scope, "held = bytearray(200 << 20)"), scope.usage().oom_kills)
print(scope.path.exists())
"""


def test_a_user_with_a_delegated_group_has_limits() -> None:
    """As systemd delegates: the directory and three of its files belong to the user."""
    root = Path("/sys/fs/cgroup")
    group = root / "delegated"
    group.mkdir()
    for file in (group, *(group / f"cgroup.{n}" for n in ("procs", "threads", "subtree_control"))):
        os.chown(file, USER, USER)
    script = f'echo $$ >{group}/cgroup.procs && exec {sys.executable} -c "$0"'
    support = str(Path(__file__).parent.parent / "python")
    done = subprocess.run(
        ["sh", "-c", script, AS_USER],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{support}"},
        check=False,
    )
    assert (done.stdout.split(), done.stderr) == (["-9", "1", "False"], "")
    (group / LEAF).rmdir()
    group.rmdir()
