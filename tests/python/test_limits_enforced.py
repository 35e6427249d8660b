"""Limits are enforced, by the control groups of this machine: version 1 here, 2 in the virtual
machine of tests/vm. Real hogs, real fork bombs; what is used is read back from the kernel."""

from __future__ import annotations

import errno
import os
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.groups import MIB, groups, run, start, version
from support.waiting import until

import branching
from branching import ProcessBranchError, ResourceLimits
from branching.process.call_limits import CallLimits
from branching.process.cgroup import Cgroup
from branching.process.cgroup.cgroup_dir import CgroupDir

ALLOCATE = "held = bytearray(int(sys.argv[1]))"
SPIN = """
import time
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    pass
"""
FORK_BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""


@pytest.mark.contract("3.12")
def test_a_process_above_the_memory_limit_is_killed() -> None:
    with Cgroup.create(ResourceLimits(memory=64 * MIB)) as scope:
        code, _ = run(scope, ALLOCATE, 200 * MIB)
        usage = scope.usage()
    assert code == -signal.SIGKILL
    assert usage.oom_kills == 1
    assert usage.memory_peak is not None
    assert 60 * MIB < usage.memory_peak <= 64 * MIB


def test_a_process_below_the_memory_limit_is_not_killed() -> None:
    with Cgroup.create(ResourceLimits(memory=128 * MIB)) as scope:
        code, _ = run(scope, ALLOCATE, 32 * MIB)
        usage = scope.usage()
    assert code == 0
    assert usage.oom_kills == 0
    assert usage.memory_peak is not None
    assert 32 * MIB < usage.memory_peak < 128 * MIB


def test_files_in_memory_count() -> None:
    """RLIMIT_AS and RLIMIT_DATA would miss these."""
    fill = """
import os
name = f"/dev/shm/branching-hog-{os.getppid()}"
file = os.open(name, os.O_CREAT | os.O_RDWR)
os.unlink(name)
for _ in range(200):
    os.write(file, bytes(1 << 20))
"""
    with Cgroup.create(ResourceLimits(memory=64 * MIB)) as scope:
        code, _ = run(scope, fill)
        assert code == -signal.SIGKILL
        assert scope.usage().oom_kills == 1


def test_processes_of_a_branch_count_together() -> None:
    """RLIMIT_AS would let each have its own 64 MiB."""
    share = """
import os
ends = []
for _ in range(4):
    if not (child := os.fork()):
        held = bytearray(40 << 20)
        os.read(0, 1)  # hold on until the end
        os._exit(0)
    ends.append(child)
print(sorted(os.waitpid(child, 0)[1] for child in ends)[-1])
"""
    with Cgroup.create(ResourceLimits(memory=100 * MIB)) as scope:
        child = start(scope, share)
        until(lambda: scope.usage().oom_kills, "a process killed for memory")
        assert child.communicate("", timeout=60)[0] == f"{signal.SIGKILL}\n"


def test_memory_that_is_only_reserved_does_not_count() -> None:
    """Java, Go and the sanitizers reserve gigabytes; RLIMIT_AS would break them."""
    reserve = "import mmap; mmap.mmap(-1, 8 << 30, flags=mmap.MAP_PRIVATE | 0x4000)"
    with Cgroup.create(ResourceLimits(memory=64 * MIB)) as scope:
        assert run(scope, reserve)[0] == 0


HOG_BESIDE_ANOTHER = """
import subprocess, time
beside = subprocess.Popen(["sleep", "600"])
hog = subprocess.Popen([sys.executable, "-c", "held = bytearray(400 << 20)"])
hog.wait()
time.sleep(float(sys.argv[1]))
print(beside.poll(), flush=True)
beside.kill()
"""


def test_out_of_memory_the_rest_lives_on() -> None:
    with Cgroup.create(ResourceLimits(memory=96 * MIB)) as scope:
        assert run(scope, HOG_BESIDE_ANOTHER, 0.5) == (0, "None\n")
        assert scope.usage().oom_kills == 1


@pytest.mark.contract("3.13")
def test_with_oom_group_all_processes_die_together() -> None:
    with Cgroup.create(ResourceLimits(memory=96 * MIB, oom_group=True)) as scope:
        code, output = run(scope, HOG_BESIDE_ANOTHER, 60)
        assert (code, output) == (-signal.SIGKILL, "")
        until(lambda: not scope.processes(), "the end of the one beside the hog")
        assert scope.usage().oom_kills >= 1


@pytest.mark.contract("3.12")
def test_cpu_time_is_a_share_of_the_wall_clock() -> None:
    with Cgroup.create(ResourceLimits(cpu=0.2)) as scope:
        started = time.monotonic()
        assert run(scope, SPIN, 2.0)[0] == 0
        used, wall = scope.usage().cpu_seconds, time.monotonic() - started
    assert used is not None
    assert 0.0 < used / wall < 0.3, f"{used:.2f} s of CPU in {wall:.2f} s"


def test_threads_on_several_cpus_share_the_limit() -> None:
    spin = f"""
import os
for _ in range(3):
    if not os.fork():
        {SPIN.strip().replace(chr(10), chr(10) + "        ")}
        os._exit(0)
for _ in range(3):
    os.wait()
"""
    with Cgroup.create(ResourceLimits(cpu=0.3)) as scope:
        started = time.monotonic()
        assert run(scope, spin, 2.0)[0] == 0
        used, wall = scope.usage().cpu_seconds, time.monotonic() - started
    assert used is not None
    assert 0.0 < used / wall < 0.45, f"{used:.2f} s of CPU in {wall:.2f} s"


def test_the_number_of_processes_is_limited() -> None:
    count = """
import os
made = 0
try:
    while made < 50:
        if not os.fork():
            os.read(0, 1)
            os._exit(0)
        made += 1
except OSError as error:
    print(made, error.errno)
"""
    with Cgroup.create(ResourceLimits(pids=8)) as scope:
        code, output = run(scope, count)
        assert (code, output) == (0, f"7 {errno.EAGAIN}\n")
        assert scope.usage().forks_refused >= 1


def test_a_fork_bomb_is_held_and_killed() -> None:
    with Cgroup.create(ResourceLimits(pids=64, cpu=0.5)) as scope:
        bomb = start(scope, FORK_BOMB)
        until(lambda: scope.usage().forks_refused > 100, "the bomb going off")
        assert len(scope.processes()) <= 64
        scope.kill()
        until(lambda: not scope.processes(), "the end of all of the bomb")
        bomb.communicate()
        assert bomb.returncode == -signal.SIGKILL


def test_killing_reaches_stopped_processes_and_other_sessions() -> None:
    scatter = """
import os, signal, subprocess
stopped = subprocess.Popen(["sleep", "600"])
os.kill(stopped.pid, signal.SIGSTOP)
if not os.fork():
    os.setsid()
    if not os.fork():
        os.execvp("sleep", ["sleep", "600"])
    os._exit(0)
print("ready", flush=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.wait()
signal.pause()
"""
    with Cgroup.create(ResourceLimits(pids=20)) as scope:
        child = start(scope, scatter)
        assert child.stdout
        assert child.stdout.readline() == "ready\n"
        until(lambda: len(scope.processes()) == 3, "three processes")
        scope.kill()
        until(lambda: not scope.processes(), "the end of all three")
        child.communicate()


def test_removing_a_group_kills_its_processes() -> None:
    scope = Cgroup.create(ResourceLimits(memory=64 * MIB))
    child = start(scope, "import time; time.sleep(600)")
    scope.remove()
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    assert not groups()
    scope.remove()
    scope.kill()
    assert scope.usage().cpu_seconds


def test_a_child_that_runs_out_of_descriptors_harms_itself_only() -> None:
    exhaust = """
import os
try:
    while True:
        os.open("/dev/null", os.O_RDONLY)
except OSError as error:
    print(error.errno)
"""
    with Cgroup.create(ResourceLimits(memory=256 * MIB)) as scope:
        assert run(scope, exhaust) == (0, f"{errno.EMFILE}\n")


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Lets this process open so many files and no more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    fillers = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 32, before[1]))
    try:
        while True:
            try:
                fillers.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
            except OSError:
                break
        for _ in range(count):
            os.close(fillers.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for filler in fillers:
            os.close(filler)


def open_descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


ALL_OF_THEM = ResourceLimits(memory=64 * MIB, cpu=0.5, pids=10, oom_group=True)


@pytest.mark.parametrize("is_nested", [False, True], ids=["alone", "in a group"])
def test_wherever_descriptors_run_out_nothing_is_left(is_nested: bool) -> None:
    """One descriptor more each time, so that every single opening fails once."""
    with Cgroup.create(ResourceLimits(memory=256 * MIB)) as group:
        before = groups()
        for count in range(32):
            open_before = open_descriptors()
            threads_before = threading.active_count()
            with descriptors_left(count):
                try:
                    scope = Cgroup.create(ALL_OF_THEM, parent=group if is_nested else None)
                except ProcessBranchError as error:
                    assert error.limit in ("memory", "oom_group"), error  # noqa: PT017
                    scope = None
            if scope is not None:
                scope.remove()
            assert open_descriptors() == open_before, f"with {count} descriptors"
            assert threading.active_count() == threads_before
            assert groups() == before
            assert not list(group.path.glob("branch-*"))
            if scope is not None:
                assert count > 0, "nothing failed"
                return
    raise AssertionError("32 descriptors are not enough")


def test_a_group_limits_its_branches_together() -> None:
    wide = ResourceLimits(memory=256 * MIB)
    with (
        Cgroup.create(ResourceLimits(memory=96 * MIB)) as group,
        Cgroup.create(wide, parent=group) as first,
        Cgroup.create(wide, parent=group) as second,
    ):
        holder = start(first, ALLOCATE + "; sys.stdin.readline()", 16 * MIB)
        until(lambda: (first.usage().memory_peak or 0) > 16 * MIB, "the first one's memory")
        code, _ = run(second, ALLOCATE, 200 * MIB)
        assert code == -signal.SIGKILL
        assert second.usage().oom_kills == 1
        assert group.usage().oom_kills == 1
        assert holder.poll() is None
        holder.communicate("\n")


def test_a_group_shares_its_cpu_among_its_branches() -> None:
    with Cgroup.create(ResourceLimits(cpu=0.3)) as group:
        with (
            Cgroup.create(ResourceLimits(), parent=group) as first,
            Cgroup.create(ResourceLimits(cpu=0.2), parent=group) as second,
        ):
            started = time.monotonic()
            children = [start(first, SPIN, 2.0), start(second, SPIN, 2.0)]
            for child in children:
                child.communicate(timeout=60)
            wall = time.monotonic() - started
        used = group.usage().cpu_seconds
    assert used is not None
    assert 0.0 < used / wall < 0.45, f"{used:.2f} s of CPU in {wall:.2f} s"


def test_a_branch_may_be_allowed_more_than_its_group_has() -> None:
    with (
        Cgroup.create(ResourceLimits(cpu=0.2)) as group,
        Cgroup.create(ResourceLimits(cpu=2.0), parent=group) as scope,
    ):
        started = time.monotonic()
        assert run(scope, SPIN, 1.0)[0] == 0
        used, wall = scope.usage().cpu_seconds, time.monotonic() - started
    assert used is not None
    assert used / wall < 0.35, f"{used:.2f} s of CPU in {wall:.2f} s"


def test_removing_a_group_ends_its_branches() -> None:
    group = Cgroup.create(ResourceLimits(pids=50))
    branch = Cgroup.create(ResourceLimits(memory=64 * MIB), parent=group)
    child = start(branch, "import time; time.sleep(600)")
    group.kill()
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    branch.remove()
    group.remove()


def test_all_limits_hold_together() -> None:
    limits = ResourceLimits(memory=64 * MIB, cpu=0.5, pids=10, disk=1, wall_time=1)
    with Cgroup.create(limits) as scope:
        assert run(scope, ALLOCATE, 200 * MIB)[0] == -signal.SIGKILL


def test_many_concurrent_scopes_leave_nothing() -> None:
    def one(_: int) -> int:
        with Cgroup.create(ResourceLimits(memory=64 * MIB, pids=4)) as scope:
            return run(scope, "")[0]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(40))) == [0] * 40
    assert not groups()


def test_a_group_that_is_removed_before_it_is_locked_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others make scopes and clear leftovers at the same time. Goal: both moments between making
    and locking a group; method: remove it there, once each."""
    open_child = CgroupDir.open_child
    removed: list[str] = []

    def hurried(self: CgroupDir, name: str) -> CgroupDir:
        if len(removed) == 2 or not name.startswith("branching-"):
            return open_child(self, name)
        removed.append(name)
        opened = open_child(self, name)
        os.rmdir(name, dir_fd=self.descriptor)
        if len(removed) == 1:
            opened.close()
            raise FileNotFoundError(errno.ENOENT, "gone", name)
        return opened

    Cgroup.create(ResourceLimits(pids=4)).remove()  # the leftovers of others are cleared once
    monkeypatch.setattr(CgroupDir, "open_child", hurried)
    with Cgroup.create(ResourceLimits(pids=4)) as scope:
        assert scope.path.is_dir()
        assert run(scope, "") == (0, "")
    assert len(removed) == 2


def test_a_process_that_has_ended_cannot_be_added() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    with (
        Cgroup.create(ResourceLimits(pids=4)) as scope,
        pytest.raises(ProcessBranchError, match=f"process {gone.pid} could not be put under"),
    ):
        scope.add(gone.pid)


@pytest.mark.skipif(version() == 2, reason="version 2 has memory_high")
def test_version_1_refuses_to_slow_down() -> None:
    with pytest.raises(ProcessBranchError, match="memory_high cannot be enforced") as caught:
        Cgroup.create(ResourceLimits(memory=64 * MIB, memory_high=32 * MIB))
    assert caught.value.limit == "memory_high"
    assert caught.value.hint
    assert not groups()


CREATE = """
import sys
import branching
from branching import ProcessBranchError, ResourceLimits
from branching.process.call_limits import CallLimits
from branching.process.cgroup import Cgroup
try:
    scope = Cgroup.create(ResourceLimits(memory=64 << 20))
except ProcessBranchError as error:
    print(error.limit, error, sep="\\n")
    sys.exit(3)
print(scope.path, flush=True)
"""


def test_groups_of_a_killed_process_are_removed_by_the_next_one() -> None:
    def create(then: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", CREATE + then], stdin=subprocess.PIPE, stdout=-1, text=True
        )

    with create("sys.stdin.read()") as killed, create("sys.stdin.read(); scope.remove()") as living:
        assert killed.stdout
        assert living.stdout
        left, used = Path(killed.stdout.readline()[:-1]), Path(living.stdout.readline()[:-1])
        killed.kill()
        killed.wait()
        assert left.is_dir()
        with create("scope.remove()") as third:
            third.communicate()
        assert third.returncode == 0
        assert not left.exists()
        assert used.is_dir(), "a scope in use was taken for a leftover"
        living.communicate()
    assert not used.exists()


def unshared(script: str, code: str = CREATE) -> tuple[int, str]:
    """Runs a shell script and then Python code in a new mount namespace."""
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", f'{script} "$@"', "sh", sys.executable, "-c", code],
        check=False,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


ALL_READ_ONLY = """
while read -r _ point type _; do
    case $type in cgroup | cgroup2) mount -o remount,bind,ro "$point" ;; esac
done < /proc/mounts
"""


def test_where_no_control_groups_are_mounted_a_limit_is_refused() -> None:
    code, output = unshared("umount --recursive --lazy /sys/fs/cgroup\n")
    assert code == 3, output
    limit, message, hint = output.splitlines()
    assert limit == "memory"
    assert "/proc/self/mountinfo shows no memory control group" in message
    assert message.endswith("nothing was started")
    assert hint.startswith("Hint: ")


def test_where_they_cannot_be_written_a_limit_is_refused() -> None:
    drop = "exec setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin"
    code, output = unshared(f"{ALL_READ_ONLY} {drop}")
    assert code == 3, output
    limit, message, hint = output.splitlines()
    assert limit == "memory"
    assert message.startswith("the limit on memory cannot be enforced: ")
    assert "Operation not permitted" in message
    assert "--cap-add SYS_ADMIN" in hint


@pytest.mark.parametrize(
    "limit", [{"memory": 64 * MIB}, {"cpu": 0.5}, {"pids": 20}], ids=lambda limit: next(iter(limit))
)
def test_branches_have_limits_though_all_together_have_none(limit: dict[str, int]) -> None:
    """In version 2 a group has only the controllers that its parent group enables."""
    budget = CallLimits(ResourceLimits(**limit), None)  # type: ignore[arg-type]
    budget.open()
    try:
        scope = budget.scope()
        assert scope
        scope.remove()
    finally:
        budget.close()


BUDGET = """
from branching import ResourceLimits
from branching.errors import ProcessBranchError
from branching.process.call_limits import CallLimits
try:
    CallLimits(ResourceLimits(pids=20), None).open()
except ProcessBranchError as error:
    print(error.limit, error, sep="\\n")
"""


def test_a_limit_of_each_branch_alone_is_named_where_it_is_refused() -> None:
    """The group of all branches comes first, and has no limit that could be named."""
    drop = "exec setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin"
    code, output = unshared(f"{ALL_READ_ONLY} {drop}", BUDGET)
    assert code == 0, output
    assert output.startswith("pids\nthe limit on pids cannot be enforced: ")


def test_an_ordinary_user_without_a_delegated_group_is_refused(as_user: tuple[int, int]) -> None:
    uid, gid = as_user
    # The user may not be able to reach the source tree, in a home directory for instance.
    tree = shlex.quote(str(Path(branching.__file__).parents[1]))
    reachable = f"mount --bind {tree} /mnt; export PYTHONPATH=/mnt"
    drop = f"exec setpriv --reuid={uid} --regid={gid} --clear-groups"
    code, output = unshared(f"{reachable}; {drop}")
    assert code == 3, output
    assert output.startswith("memory\nthe limit on memory cannot be enforced: ")


READ_ONLY_YET_LIMITED = """
import os
from pathlib import Path
from support.groups import MIB, run
from branching import ResourceLimits
from branching.process.call_limits import CallLimits
from branching.process.cgroup import Cgroup
def groups():  # mounts of others may go meanwhile
    return [row for row in Path("/proc/self/mountinfo").open() if " - cgroup" in row]
before = groups()
with Cgroup.create(ResourceLimits(memory=64 << 20, cpu=0.5, pids=20)) as scope:
    assert scope.path.is_dir()
    for write in (lambda: (scope.path / "cgroup.procs").write_text("0"),
                  lambda: (scope.path / "more").mkdir()):
        try:
            write()
        except OSError as error:
            assert error.errno == 30, error
        else:
            raise AssertionError("a path leads to the group")
    print(*run(scope, "held = bytearray(200 << 20)"), scope.usage().oom_kills)
assert not scope.path.exists()
assert before and groups() == before
"""


def test_read_only_groups_are_written_without_a_writable_path() -> None:
    """As in the container of the image: the mounts stay read-only for all other processes."""
    support = Path(__file__).parent
    code, output = unshared(f"{ALL_READ_ONLY} exec env PYTHONPATH={support}", READ_ONLY_YET_LIMITED)
    assert (code, output.split()) == (0, ["-9", "1"])


def test_descriptors_of_a_scope_do_not_reach_other_programs() -> None:
    with Cgroup.create(ResourceLimits(memory=64 * MIB)):
        seen = subprocess.run(["ls", "-l", "/proc/self/fd"], stdout=-1, text=True, check=True)
    assert "cgroup" not in seen.stdout


@pytest.mark.contract("3.14")
def test_a_limit_takes_hold_before_the_program_runs() -> None:
    """The child waits until it is in the group, so that all its forks count."""
    with Cgroup.create(ResourceLimits(pids=1)) as scope:
        code, output = run(scope, "import os\ntry: os.fork()\nexcept OSError as e: print(e.errno)")
        assert (code, output) == (0, f"{errno.EAGAIN}\n")
