"""The rules of the sandbox, one by one: each test fails if the line of its rule is removed.

Escapes that several rules prevent are in `test_escape`: there one rule hides that another is
missing. docs/security.md lists the test of each rule.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from conftest import Mounted
from support.branchfs import await_dead, daemon_of, find_program, mounted
from support.sandbox import run_in
from support.sandboxed_branch import OWNER, SandboxedBranch
from support.waiting import until

from branching import BranchContext, ProcessBranchError, Workspace
from branching._linux import syscalls
from branching.process.sandbox import fork_server_client, launcher, parent_state, rootfs
from branching.process.sandbox import seccomp as call_filter

COMMAND_OR_FUNCTION = pytest.mark.parametrize("is_command", [True, False])
ROOT_ONLY = pytest.mark.parametrize("pair", ["root"], indirect=True)


@ROOT_ONLY
class TestFiles:
    def test_system_files_are_masked(self, sandboxed: SandboxedBranch) -> None:
        said = sandboxed.attempt(
            "for f in "
            + " ".join(rootfs._MASKED)
            + '; do [ -d $f ] && ls -A $f; [ -f $f ] && cat $f && echo "$f is readable"; done; true'
        )
        assert said.out == ""
        assert sum(Path(path).exists() for path in rootfs._MASKED) > 2

    def test_covers_cannot_be_written_on(self, sandboxed: SandboxedBranch) -> None:
        said = sandboxed.attempt(
            'touch "$ROOT/../base/x" "$BASE/x" "$OTHER_ROOT/x" /run/x /dev/x; true'
        )
        assert said.err.count("Read-only file system") == 5, said.err

    def test_the_branch_has_neither_setuid_programs_nor_devices(
        self, sandboxed: SandboxedBranch
    ) -> None:
        flags = options_of(sandboxed, str(sandboxed.pair.root))
        assert {"nosuid", "nodev", "rw"} <= flags

    def test_the_base_of_another_workspace_is_like_all_other_files(
        self, sandboxed: SandboxedBranch
    ) -> None:
        said = sandboxed.attempt('cat "$OTHER_BASE/seed.txt"; touch "$OTHER_BASE/seed.txt"')
        assert said.out == "seed\n"
        assert "Read-only file system" in said.err

    @pytest.mark.parametrize("place", ["/tmp", "/var/tmp", "/dev/shm"])
    def test_nor_have_its_own_directories(self, sandboxed: SandboxedBranch, place: str) -> None:
        assert {"nosuid", "nodev"} <= options_of(sandboxed, place)

    @pytest.mark.parametrize("place", ["/", "/sys"])
    def test_mounts_of_the_host_are_read_only_inside(
        self, sandboxed: SandboxedBranch, place: str
    ) -> None:
        """Landlock refuses writes as well."""
        assert "ro" in options_of(sandboxed, place)

    def test_terminals_are_its_own(self, sandboxed: SandboxedBranch) -> None:
        assert sandboxed.attempt("ls /dev/pts").lines == ["ptmx"]

    def test_hidden_files_are_covered(self, sandboxed: SandboxedBranch) -> None:
        assert "denied" in sandboxed.attempt("cat seed.txt", hide=["seed.txt"]).err

    def test_hidden_directories_cannot_be_opened_by_changing_them(
        self, sandboxed: SandboxedBranch
    ) -> None:
        (sandboxed.branch.path / "secrets").mkdir()
        said = sandboxed.attempt("ls secrets; chmod 755 secrets", hide=["secrets"])
        assert "Permission denied" in said.err
        assert "Read-only file system" in said.err

    def test_extra_visible_paths_cannot_be_written(self, sandboxed: SandboxedBranch) -> None:
        beside = Path("/tmp/beside")
        said = sandboxed.attempt(
            "cat /tmp/beside/secret && touch /tmp/beside/x",
            beside=[(sandboxed.pair.sibling.path, beside)],
        )
        assert "a sibling's secret" in said.out
        assert "Read-only file system" in said.err


def test_paths_kept_visible_cannot_be_written(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtualenv on PATH that lies in the base: shown as the branch has it."""
    kept = outside / "private" / "bin"
    (outside / "work" / "bin").mkdir(parents=True)
    kept.mkdir(parents=True)
    (outside / "private" / "secret").touch()
    (outside / "work" / "bin" / "tool").touch()
    monkeypatch.setenv("PATH", f"{kept}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "path", [])
    script = f"ls '{outside}/private' '{kept}'; touch '{kept}/x'"
    said = run_in(outside / "work", script, private=[outside / "private"])
    assert said.lines == [f"{outside}/private:", "bin", "", f"{kept}:", "tool"]
    assert "Read-only file system" in said.err


@pytest.mark.parametrize("is_namespaced", [False, True])
@COMMAND_OR_FUNCTION
def test_a_workspace_on_a_disk_below_a_directory_of_programs_is_seen(
    place: Path, monkeypatch: pytest.MonkeyPatch, is_namespaced: bool, is_command: bool
) -> None:
    """A sandbox shows the directory below /tmp, read-only. Programs may lie on the disk, too."""
    if is_namespaced:
        monkeypatch.setattr(parent_state, "_may_make_namespaces", lambda _: False)
    disk = place / "programs" / "disk"
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", disk], check=True)
    try:
        for directory in (disk.parent, disk / "bin"):
            directory.mkdir(exist_ok=True)
            (directory / f"tool-{directory.name}").write_text("#!/bin/sh\necho found\n")
            (directory / f"tool-{directory.name}").chmod(0o755)
        (disk / "work").mkdir()
        monkeypatch.setenv("PATH", f"{disk.parent}:{disk}/bin:{os.environ['PATH']}")
        calls = "pwd; tool-programs; tool-bin; touch ../x ../../x ../bin/x; touch /tmp/x"
        script = f"{{ {calls}; }} >said 2>&1"

        def function(path: Path) -> None:
            subprocess.run(["sh", "-c", script], cwd=path, check=True)

        target = ["sh", "-c", script] if is_command else function
        with Workspace.open(disk / "work") as space, space.branch("b", on_success=None) as branch:
            with BranchContext(target, branch, seen_at=space.seen_at) as context:
                context.wait(60)
            said = (branch.path / "said").read_text()
            branch.abort()
    finally:
        subprocess.run(["umount", disk], check=True)
    assert said.splitlines()[:3] == [str(disk / "work"), "found", "found"]
    assert said.count("Read-only file system") == 3, said


def options_of(sandboxed: SandboxedBranch, point: str) -> set[str]:
    """The flags of the mount that is seen at `point`."""
    rows = [line.split() for line in sandboxed.attempt("cat /proc/self/mountinfo").lines]
    found = [row[5] for row in rows if row[4].replace("\\040", " ") == point]
    return set(found[-1].split(","))


@ROOT_ONLY
def test_memory_that_others_share_is_out_of_sight(sandboxed: SandboxedBranch) -> None:
    """System V shared memory is reached by number, not by name."""
    libc = ctypes.CDLL(None, use_errno=True)
    ipc_create, ipc_remove = 0o1000, 0
    segment = libc.shmget(0, 4096, ipc_create | 0o666)
    assert segment >= 0
    try:
        assert str(segment) in Path("/proc/sysvipc/shm").read_text()
        said = sandboxed.attempt("tail -n +2 /proc/sysvipc/shm")
        assert (said.out, said.code) == ("", 0)
    finally:
        libc.shmctl(segment, ipc_remove, None)


def test_a_sandbox_keeps_no_mount_of_others_busy(real: Mounted, outside: Path) -> None:
    """Its mount table is a copy, in which a mount would stay after it is unmounted outside."""
    device = real.root.stat().st_dev
    said = run_in(outside, "cat /proc/self/mountinfo")
    assert said.code == 0
    assert f" {os.major(device)}:{os.minor(device)} " not in said.out


@pytest.mark.parametrize("is_namespaced", [False, True])
@COMMAND_OR_FUNCTION
def test_a_dead_mount_keeps_no_sandbox_from_starting(
    real: Mounted,
    outside: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_namespaced: bool,
    is_command: bool,
) -> None:
    """Another workspace's daemon was killed: nothing can reach its files, nor cover them."""
    if is_namespaced:
        monkeypatch.setattr(parent_state, "_may_make_namespaces", lambda _: False)
    with mounted(outside / "base", outside / "dead"):
        os.kill(daemon_of(outside / "dead"), signal.SIGKILL)
        await_dead(outside / "dead")
        with Workspace(real.root) as space, space.branch("b", on_success=None) as branch:
            target = ["true"] if is_command else lambda _: None
            with BranchContext(target, branch) as context:
                context.wait(60)
            branch.abort()
        subprocess.run(["umount", outside / "dead"], check=True)
        # Another daemon is there to be unmounted.
        subprocess.run(
            [find_program(), "mount", "--base", outside / "base", outside / "dead"], check=True
        )


def test_a_cover_is_sealed_unless_its_directory_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """rmdir(2) unmounts the cover first: then there is a directory, but no mount (EINVAL)."""
    numbers = iter((errno.EINVAL, errno.ENOENT))

    def seal(place: str) -> None:
        number = next(numbers)
        raise OSError(number, os.strerror(number), place)

    monkeypatch.setattr(rootfs, "_seal", seal)
    rootfs._seal_cover("/going")
    assert list(numbers) == []


CALLS_OF_A_START = """
import sys
from collections import Counter
from branching._linux import syscalls
from branching.process.sandbox.config import Sandbox
from branching.process.sandbox.rootfs import RootFS
calls = Counter()
def counted(name):
    call = getattr(syscalls, name)
    def count(*args):
        calls[name] += 1
        return call(*args)
    return count
for name in ("mount", "unmount", "clone_mount", "attach_mount"):
    setattr(syscalls, name, counted(name))
branch, root = sys.argv[1:]
RootFS(Sandbox.of(branch, at=root), (0, 0), []).build()
with open("/proc/self/mountinfo") as table:
    print(calls.total(), sum("branchfs" in line for line in table))
"""


UNMOUNT_OTHERS = """
import subprocess, sys
from branching._linux import mountinfo
from branching.process.sandbox import mount_table
for mount in mount_table.outermost(filter(mount_table.is_branchfs, mountinfo.read_table())):
    if mount.point != sys.argv[1]:
        subprocess.run(["umount", "--lazy", mount.point], check=True)
"""


def test_a_start_makes_as_many_calls_with_many_branches_as_with_one(overlaid: Mounted) -> None:
    """Each branch of the overlay driver is a mount of its own.

    Both starts see one copy of the mount table, with this workspace alone: others come and go.
    """
    with Workspace(overlaid.root) as workspace, ExitStack() as stack:
        branches = [
            stack.enter_context(workspace.branch(f"b{number}", on_success=None))
            for number in range(9)
        ]
        first, *others = (str(branch.path) for branch in branches)
        start = [sys.executable, "-c", CALLS_OF_A_START, first, str(overlaid.root)]
        alone = [sys.executable, "-c", UNMOUNT_OTHERS, str(overlaid.root)]
        script = "; ".join(map(shlex.join, (alone, start, ["umount", *others], start)))
        argv = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", script]
        nine, one = (line.split() for line in subprocess.check_output(argv, text=True).splitlines())
        for branch in branches:
            branch.abort()
    assert one == nine
    assert one[1] == "1", "only the mount of the branch itself is seen in the sandbox"


def test_mounts_made_inside_are_not_propagated_outside(outside: Path) -> None:
    """Most systems share what is mounted with every copy of the table."""
    shared, secret = outside / "shared", outside / "shared" / "private" / "secret"
    secret.parent.mkdir(parents=True)
    secret.touch()
    (outside / "work").mkdir()
    subprocess.run(["mount", "--bind", shared, shared], check=True)
    subprocess.run(["mount", "--make-shared", shared], check=True)
    try:
        said = run_in(outside / "work", f"ls -A '{secret.parent}'", private=[secret.parent])
        assert (said.out, said.code) == ("", 0)
        assert secret.exists()
    finally:
        subprocess.run(["umount", "--recursive", shared], check=True)


def test_a_read_only_mount_stays_read_only(outside: Path) -> None:
    """A project that a container was given with `:ro`."""
    given = outside / "given"
    given.mkdir()
    subprocess.run(["mount", "--bind", given, given], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", given], check=True)
    try:
        said = run_in(given, "touch x")
    finally:
        subprocess.run(["umount", given], check=True)
    assert "Read-only file system" in said.err
    assert not (given / "x").exists()


def test_a_function_has_no_capability_either(real_workspace: Workspace) -> None:
    """It is not executed, which alone would take them from a command."""

    def status(path: Path) -> str:
        return Path("/proc/self/status").read_text()

    with real_workspace.branch("b", on_success=None) as branch:
        with BranchContext(status, branch) as context:
            context.wait()
            rows = str(context.result.value).splitlines()
        branch.abort()
    assert "NoNewPrivs:\t1" in rows
    for name in ("Inh", "Prm", "Eff", "Bnd", "Amb"):
        assert f"Cap{name}:\t{0:016x}" in rows


IN_CONTEXT = "with BranchContext(['id', '-G'], sys.argv[1], isolation='{}') as one: one.wait()"
AS_COMMAND = """
with Owner.of(*map(int, sys.argv[2:])) as owner:
    Command(["id", "-G"], cwd=Path(sys.argv[1]), environment=os.environ, owner=owner).run()
"""


@pytest.mark.parametrize(
    "way",
    [IN_CONTEXT.format("sandbox"), IN_CONTEXT.format("none"), AS_COMMAND],
    ids=["sandbox", "no sandbox", "command without one"],
)
def test_no_group_of_the_callers_is_taken_along(outside: Path, way: str) -> None:
    os.chown(outside, *OWNER)
    script = (
        "import os, sys; from pathlib import Path; from branching import BranchContext\n"
        "from branching.process import Command, Owner\n"
        f"os.setgroups([4, 6])\n{way}"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(outside), *map(str, OWNER)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == f"{OWNER[1]}\n"


class TestFilter:
    """The program is run here as the kernel runs it, against the kernel's own numbers."""

    TABLES = (
        ("x86_64", 0xC000003E, "x86_64-linux-gnu/asm/unistd_64.h"),
        ("x86_64", 0x40000003, "x86_64-linux-gnu/asm/unistd_32.h"),
        ("aarch64", 0xC00000B7, "asm-generic/unistd.h"),
    )
    REFUSED = (
        "acct", "add_key", "bpf", "delete_module", "finit_module", "fsconfig", "fsmount",
        "fsopen", "fspick", "init_module", "io_uring_setup", "kexec_file_load", "kexec_load",
        "keyctl", "mount", "mount_setattr", "move_mount", "open_by_handle_at", "open_tree",
        "perf_event_open", "pivot_root", "reboot", "request_key", "setns", "swapoff", "swapon",
        "umount", "umount2", "userfaultfd",
    )  # fmt: skip
    UNKNOWN = ("clone3", "socketcall")
    ALLOWED = ("read", "execve", "clone", "ioctl", "unshare", "ptrace")

    @pytest.mark.parametrize(("machine", "architecture", "header"), TABLES)
    def test_every_call_is_refused_by_its_number(
        self, machine: str, architecture: int, header: str
    ) -> None:
        numbers = numbers_in(Path("/usr/include", header))
        program = call_filter.program(machine)
        for name in (*self.REFUSED, *self.UNKNOWN):
            if name in numbers:  # each architecture lacks one or two
                answer = judged(program, architecture, numbers[name])
                assert answer == (errno.ENOSYS if name in self.UNKNOWN else errno.EPERM), name
        for name in self.ALLOWED:
            assert judged(program, architecture, numbers[name]) == 0, name

    @pytest.mark.parametrize(("machine", "architecture", "header"), TABLES)
    def test_sockets_are_of_few_families(
        self, machine: str, architecture: int, header: str
    ) -> None:
        number = numbers_in(Path("/usr/include", header))["socket"]
        program = call_filter.program(machine)
        allowed = [n for n in range(64) if judged(program, architecture, number, n) == 0]
        assert allowed == [socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK]
        assert judged(program, architecture, number, 40) == errno.EAFNOSUPPORT

    @pytest.mark.parametrize(("machine", "architecture", "header"), TABLES)
    def test_namespaces_and_typing_are_refused_by_argument(
        self, machine: str, architecture: int, header: str
    ) -> None:
        numbers = numbers_in(Path("/usr/include", header))
        program = call_filter.program(machine)
        for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
            for name in ("clone", "unshare"):
                assert judged(program, architecture, numbers[name], flag) == errno.EPERM
        # That of time namespaces; of clone's argument the same bit belongs to a signal.
        assert judged(program, architecture, numbers["unshare"], 0x80) == errno.EPERM
        assert judged(program, architecture, numbers["clone"], 0x80) == 0
        for request in (0x5412, 0x541C):
            assert judged(program, architecture, numbers["ioctl"], 0, request) == errno.EPERM
        assert judged(program, architecture, numbers["ioctl"], 0, 0x5401) == 0

    def test_other_architectures_and_x32_have_no_calls(self) -> None:
        program = call_filter.program("x86_64")
        assert judged(program, 0xC00000B7, 63) == errno.ENOSYS
        assert judged(program, 0xC000003E, 0x40000000) == errno.ENOSYS


def numbers_in(header: Path) -> dict[str, int]:
    """Reads the kernel's own header (linux-libc-dev, which every C compiler needs)."""
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(?:__NR3264_)?(\d+)", header.read_text())
    return {name: int(number) for name, number in found}


def judged(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    """Runs a filter as linux/seccomp.h says; returns the errno of its answer, 0 for allowed."""
    words = [*arguments, 0, 0][:2]
    data = struct.pack("=IIQQQ", number, architecture, 0, *words)
    code = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    value, at = 0, 0
    while True:
        operation, if_true, if_false, constant = code[at]
        at += 1
        if operation == 0x20:
            (value,) = struct.unpack_from("=I", data, constant)
        elif operation == 0x06:
            return 0 if constant == 0x7FFF0000 else constant & 0xFFFF
        else:
            test = {
                0x15: value == constant,
                0x35: value >= constant,
                0x45: bool(value & constant),
            }[operation]
            at += if_true if test else if_false


class TestLandlock:
    """Alone, without the mounts that say the same."""

    def run(self, outside: Path, code: str, output: int = subprocess.PIPE) -> str:
        (outside / "in").mkdir()
        script = (
            "import os, signal, socket, sys\n"
            "from branching._linux import syscalls\n"
            "from branching.process.sandbox import landlock\n"
            "syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)\n"
            "landlock.restrict([sys.argv[1] + '/in'], [1])\n"
            f"{code}"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, str(outside)],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
        return (done.stdout or "") + done.stderr

    @pytest.fixture(autouse=True)
    def _version(self) -> None:
        if (found := syscalls.landlock_version()) < 6:
            pytest.skip(f"this kernel has version {found} of Landlock, and 6 keeps all of this in")

    def test_writing_is_for_the_named_places_only(self, outside: Path) -> None:
        code = "open(sys.argv[1] + '/in/x', 'w').close(); open(sys.argv[1] + '/x', 'w')"
        assert "PermissionError" in self.run(outside, code)
        assert (outside / "in" / "x").exists()
        assert not (outside / "x").exists()

    def test_nor_is_a_file_elsewhere_cut_short(self, outside: Path) -> None:
        (outside / "x").write_text("whole")
        assert "PermissionError" in self.run(outside, "os.truncate(sys.argv[1] + '/x', 0)")
        assert (outside / "x").read_text() == "whole"

    def test_nor_does_a_device_elsewhere_hear_commands(self, outside: Path) -> None:
        code = "import fcntl, termios; fcntl.ioctl(open('/dev/null'), termios.TCGETS, bytes(64))"
        assert "PermissionError" in self.run(outside, code)

    def test_signals_stay_inside(self, outside: Path) -> None:
        assert "PermissionError" in self.run(outside, "os.kill(os.getppid(), 0)")

    def test_abstract_sockets_stay_inside(self, outside: Path) -> None:
        name = f"\0branching-walls-{outside.name}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(name)
            listener.listen()
            code = f"socket.socket(socket.AF_UNIX).connect({name!r})"
            assert "PermissionError" in self.run(outside, code)

    def test_outputs_can_be_opened_again(self, outside: Path) -> None:
        """Wherever the caller's files lie."""
        with (outside / "output").open("w") as output:
            said = self.run(outside, "print('x', file=open('/dev/stdout', 'w'))", output.fileno())
        assert said == ""
        assert (outside / "output").read_text() == "x\n"


def kill_what_started(context: BranchContext) -> None:
    """Kills the launcher of a command, or the server that has forked a function."""
    assert context._process is not None
    pid = context._process._started.launcher
    if pid is None:
        assert fork_server_client._server is not None
        pid = fork_server_client._server._process.pid
    os.kill(pid, signal.SIGKILL)


@COMMAND_OR_FUNCTION
def test_the_death_of_the_one_that_starts_them_ends_all(real: Mounted, is_command: bool) -> None:
    """PDEATHSIG: no process is left, however it is killed."""
    space = Workspace(real.root)
    with space.branch("b", on_success=None) as branch:
        target = ["sleep", "600"] if is_command else lambda _: time.sleep(600)
        with BranchContext(target, branch) as context:
            kill_what_started(context)
            with pytest.raises(ProcessBranchError):
                context.wait(60)
        branch.abort()
    space.close()


@COMMAND_OR_FUNCTION
def test_without_a_sandbox_it_ends_all_too(real: Mounted, is_command: bool) -> None:
    """The first process gets a signal, and ends the others, which no process namespace ends."""
    space = Workspace(real.root)
    with space.branch("b", on_success=None) as branch:
        script = "setsid sleep 600 & echo $! >new && mv new pid; exec sleep 600"
        argv = ["sh", "-c", script]
        target = argv if is_command else lambda path: subprocess.run(argv, cwd=path, check=False)
        with BranchContext(target, branch, isolation="none") as context:
            until((branch.path / "pid").exists, "the process that has left")
            left = os.pidfd_open(int((branch.path / "pid").read_text()))
            kill_what_started(context)
            with pytest.raises(ProcessBranchError):
                context.wait(60)
        try:
            assert select.select([left], [], [], 60)[0], "it runs on"
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(left, signal.SIGKILL)
            os.close(left)
        branch.abort()
    space.close()


def test_the_death_of_the_caller_ends_all_though_a_copy_of_it_lives(outside: Path) -> None:
    """A process that it has forked holds its end of the line open."""
    script = """
import os, sys, time
from branching import BranchContext
with BranchContext(["sh", "-c", "echo $$ >new && mv new pid; exec sleep 600"], sys.argv[1],
                   isolation="none") as context:
    while not os.path.exists(sys.argv[1] + "/pid"):
        time.sleep(0.01)
    if os.fork() == 0:
        time.sleep(600)
    os.kill(os.getpid(), 9)
"""
    argv = [sys.executable, "-c", script, str(outside)]
    caller = subprocess.Popen(argv, start_new_session=True)
    try:
        caller.wait(60)
        pid = int((outside / "pid").read_text())
        until(lambda: not Path(f"/proc/{pid}").exists(), "the end of what the caller started")
    finally:
        os.killpg(caller.pid, signal.SIGKILL)


def test_it_ends_all_processes_if_its_caller_exits_before_the_answer(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unread data resets the connection, which is another error than a closed one."""
    hear = launcher._hear

    def never(*arguments: object, **options: object) -> None:
        until((outside / "pid").exists, "the program that runs by now")
        monkeypatch.setattr(launcher, "_hear", hear)
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher, "_hear", never)
    script = "echo $$ >new && mv new pid; exec sleep 600"
    with (
        pytest.raises(KeyboardInterrupt),
        BranchContext(["sh", "-c", script], outside, isolation="none"),
    ):
        pass
    pid = int((outside / "pid").read_text())
    try:
        until(lambda: not Path(f"/proc/{pid}").exists(), "its end")
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
