"""Attempts to escape from the sandbox, which must fail: through files, processes and its end.

Each attempt runs in the sandbox of a branch on a real mount, as root without capabilities, as an
ordinary user, and in a user namespace, and prints ESCAPED if it got anywhere.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from conftest import Mounted
from support.sandbox import run_in
from support.sandboxed_branch import SandboxedBranch
from support.traces import processes_in

from branching import BranchContext, ProcessBranchError, ResourceLimits, Workspace
from branching.process.cgroup import Cgroup
from branching.process.sandbox import rootfs
from branching.process.sandbox.config import PRIVATE_XATTR

MIB = 1 << 20
LONG = 300.0


SHELL = {
    "the base by its path": 'ls "$BASE"/* && echo ESCAPED; cat "$BASE/seed.txt" && echo ESCAPED',
    "the base by a link": 'ln -s "$BASE" link; cat link/seed.txt && echo ESCAPED',
    "the store": 'ls "$BASE/.branching" "$ROOT/.branching" && echo ESCAPED',
    "a sibling by its path": 'cat "$SIBLING/secret" && echo ESCAPED',
    "a sibling by name": "cat @sibling/secret ../@sibling/secret && echo ESCAPED",
    "a sibling by a link": 'ln -s "$SIBLING" link; cat link/secret && echo ESCAPED',
    "another workspace": 'ls "$OTHER_ROOT"/* && echo ESCAPED; cat "$OTHER_ROOT/@others/secret" && echo ESCAPED',
    "another's store": 'ls "$OTHER_BASE/.branching/"* && echo ESCAPED; cat "$OTHER_BASE"/.branching/*/*/* | grep secret && echo ESCAPED',
    "roots of processes": 'cat /proc/*/root"$BASE/seed.txt" && echo ESCAPED',
    "directories of processes": 'cat /proc/*/cwd/../*/@sibling/secret && echo ESCAPED',
    "files of init": "ls /proc/1/fd/* && echo ESCAPED; cat /proc/1/mem /proc/1/environ && echo ESCAPED",
    "its own open files": 'ls -l /proc/self/fd | grep -v pipe: | grep -F -e "$BASE" -e sock && echo ESCAPED',
    "processes outside": 'kill -0 $OUTSIDER && echo ESCAPED; kill -9 $OUTSIDER',
    "the test's own process": 'ls -d /proc/$TEST && echo ESCAPED',
    "a namespace of another": "nsenter -t 1 -a true && echo ESCAPED; nsenter -t $OUTSIDER -m true && echo ESCAPED",
    "user namespaces": "unshare -U true && echo ESCAPED; unshare -Ur mount -t tmpfs x /mnt && echo ESCAPED",
    "mounting": 'mount --bind / /tmp && echo ESCAPED; umount "$BASE" && echo ESCAPED; umount -l "$ROOT" && echo ESCAPED',
    "making it writable": "mount -o remount,rw / && echo ESCAPED; mount -o remount,rw /proc/sys && echo ESCAPED",
    "device nodes": "for kind in 'b 254 0' 'c 1 1' 'c 10 229'; do mknod node $kind && cat node && echo ESCAPED; done",
    "setuid": "cp /bin/sh mine; chmod 6755 mine; ./mine -p -c 'touch /etc/x' && echo ESCAPED",
    "writing outside": "touch /etc/x /usr/x /var/x /root/x /home/x && echo ESCAPED; : >>/etc/passwd && echo ESCAPED",
    "linking out": "ln /etc/passwd here && echo ESCAPED; ln seed.txt /tmp/there && echo ESCAPED; mv seed.txt /etc/ && echo ESCAPED",
    "the kernel's switches": ": >>/proc/sys/kernel/core_pattern && echo ESCAPED; : >>/proc/sysrq-trigger && echo ESCAPED",
    "control groups": "for f in $(find /sys/fs/cgroup -name cgroup.procs); do : >>$f && echo ESCAPED; done; find /sys/fs/cgroup -name '*.limit_in_bytes' -o -name memory.max | while read f; do : >>$f && echo ESCAPED; done",
    "making a control group": "for d in $(find /sys/fs/cgroup -maxdepth 2 -type d); do mkdir $d/mine && echo ESCAPED; done",
    "disks": "for d in vda sda nvme0n1 mem kmsg fuse; do ls /dev/$d && echo ESCAPED; done",
    "run": "find /run -type s -o -name '*.sock' | grep . && echo ESCAPED",
    "leaving a daemon": "setsid sh -c '(sleep 600 &) &' & nohup sleep 600 & true",
}  # fmt: skip

PYTHON = {
    "the control socket": """
import socket
for address in (CONTROL, "/proc/1/root" + CONTROL, OTHER_CONTROL):
    try:
        socket.socket(socket.AF_UNIX).connect(address)
        print("ESCAPED")
    except OSError:
        pass
""",
    "tracing init": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for pid in (1, int(OUTSIDER), int(TEST)):
    if libc.ptrace(16, pid, 0, 0) == 0 or libc.ptrace(0x4206, pid, 0, 0) == 0:
        print("ESCAPED")
""",
    "memory of others": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for pid in (1, int(OUTSIDER)):
    try:
        open(f"/proc/{pid}/mem", "rb")
        print("ESCAPED")
    except OSError:
        pass
""",
    "system calls by number": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
calls = {"mount": 165, "umount2": 166, "pivot_root": 155, "setns": 308, "open_tree": 428,
         "fsopen": 430, "bpf": 321, "keyctl": 250, "open_by_handle_at": 304, "move_mount": 429}
for name, number in calls.items():
    if libc.syscall(number, b"/", b"/tmp", None, 4096, None) >= 0:
        print("ESCAPED", name)
for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x4000000, 0x8000000, 0x2000000, 0x80):
    if libc.syscall(272, flag) == 0:
        print("ESCAPED unshare", hex(flag))
for flag in (0x10000000, 0x20000, 0x20000000):
    pid = libc.syscall(56, flag | 17, 0, 0, 0, 0)
    if pid == 0:
        libc._exit(0)
    if pid > 0:
        print("ESCAPED clone", hex(flag))
import errno
libc.syscall(435, ctypes.create_string_buffer(88), 88)
if ctypes.get_errno() != errno.ENOSYS:
    print("ESCAPED clone3")
if libc.syscall(0x40000000 + 165, b"/", b"/tmp", None, 4096, None) >= 0:
    print("ESCAPED x32")
""",
    "typing into a terminal": """
import fcntl, os
master, slave = os.openpty()
try:
    fcntl.ioctl(slave, 0x5412, b"x")
    print("ESCAPED")
except OSError:
    pass
""",
    "becoming another": """
import os
for change in (
               lambda: os.setuid(4321), lambda: os.setgroups([0]), lambda: os.chown("seed.txt", 4321, 4321),
               lambda: os.chroot("/tmp"), lambda: os.setuid(0) if os.getuid() else 1 / 0):
    try:
        change()
        print("ESCAPED")
    except (OSError, ZeroDivisionError):
        pass
""",
    "open directories": """
import os
for number in os.listdir("/proc/self/fd"):
    try:
        os.stat(f"/proc/self/fd/{number}/..")
    except OSError:
        continue
    if not os.readlink(f"/proc/self/fd/{number}").startswith("/proc"):
        print("ESCAPED", number, os.readlink(f"/proc/self/fd/{number}"))
""",
    "sockets of programs": """
import socket
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    for address in (SOCKET, "/proc/1/root" + SOCKET):
        try:
            socket.socket(socket.AF_UNIX, kind).connect(address)
            print("ESCAPED")
        except OSError:
            pass
""",
    "the machine that this one is a guest of": """
import socket
try:
    socket.socket(40, socket.SOCK_STREAM)  # AF_VSOCK: no network namespace keeps it in
    print("ESCAPED")
except OSError:
    pass
""",
    "rings that no filter sees": """
import ctypes
if ctypes.CDLL(None).syscall(425, 4, ctypes.create_string_buffer(120)) >= 0:
    print("ESCAPED")
""",
    "programs without a file": """
import os
name = os.memfd_create("mine")
with open("/bin/sh", "rb") as shell:
    os.write(name, shell.read())
os.fchmod(name, 0o6755)
if os.fork() == 0:
    os.execve(name, ["sh", "-p", "-c", "touch /etc/x && echo ESCAPED; mount -t tmpfs x /mnt && echo ESCAPED"], {})
os.wait()
""",
    "the program of its first process": """
import os
for path in ("/proc/1/exe", "/proc/self/exe"):
    try:
        os.open(path, os.O_WRONLY)
        print("ESCAPED", path)
    except OSError:
        pass
""",
    "handles, faults and watches": """
import ctypes, os
libc = ctypes.CDLL(None)
handle = ctypes.create_string_buffer((128).to_bytes(4, "little") + bytes(132))
mount = ctypes.c_int()
libc.name_to_handle_at(-100, b"/", handle, ctypes.byref(mount), 0)
root = os.open("/", os.O_RDONLY)
if libc.open_by_handle_at(root, handle, 0) >= 0:
    print("ESCAPED by a handle")
for number, arguments in ((323, (1,)), (298, (bytes(128), 0, -1, -1, 0)), (248, (b"user", b"x", b"y", 1, -3))):
    if libc.syscall(number, *arguments) >= 0:
        print("ESCAPED", number)
for path in ("/dev/userfaultfd", "/dev/kvm", "/dev/vsock", "/dev/mem", "/dev/port", "/dev/fuse", "/proc/kcore"):
    try:
        os.open(path, os.O_RDONLY)
        print("ESCAPED", path)
    except OSError:
        pass
""",
    "queues of messages": """
import ctypes
libc = ctypes.CDLL(None)
if libc.mq_open(b"/branching-test", 0) >= 0 or libc.msgget(int(QUEUE), 0) >= 0:
    print("ESCAPED")
""",
    "switches of its own processes": """
import os
for path, text in (
    ("/proc/self/uid_map", "0 0 1"), ("/proc/self/oom_score_adj", "-1000"),
    ("/proc/sys/fs/binfmt_misc/register", ":x:M::x::/bin/sh:"), ("/proc/self/attr/current", "unconfined"),
    ("/sys/kernel/uevent_helper", "/x"), ("/sys/power/state", "mem"),
):
    try:
        with open(path, "w") as file:
            file.write(text)
        print("ESCAPED", path)
    except OSError:
        pass
""",
    "the priority and limits of its first process": """
import os, resource
for attempt in (
    lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
    lambda: os.setpriority(os.PRIO_PGRP, 1, 19),
    lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19),
    lambda: os.setpriority(os.PRIO_USER, 0, 19),
    lambda: os.sched_setaffinity(1, {min(os.sched_getaffinity(0))}),
    lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
    lambda: os.sched_setparam(1, os.sched_param(0)),
    lambda: resource.prlimit(1, resource.RLIMIT_CPU, (1, 1)),
):
    try:
        attempt()
        print("ESCAPED")
    except OSError as error:
        assert error.errno in (1, 3), error
os.setpriority(os.PRIO_PROCESS, 0, 5)  # its own are its own
os.sched_setaffinity(0, os.sched_getaffinity(0))
resource.setrlimit(resource.RLIMIT_CPU, (100, 100))
""",
    "abstract sockets": """
import socket
try:
    socket.socket(socket.AF_UNIX).connect("\\0branching-test-" + TEST)
    print("ESCAPED")
except OSError:
    pass
""",
}


@pytest.mark.parametrize("name", SHELL)
def test_no_command_gets_out(sandboxed: SandboxedBranch, name: str) -> None:
    said = sandboxed.attempt(SHELL[name])
    assert "ESCAPED" not in said.text, said.text
    assert "SyntaxError" not in said.text


@pytest.mark.parametrize("name", PYTHON)
def test_no_program_gets_out(sandboxed: SandboxedBranch, name: str, outside: Path) -> None:
    sandboxed.words |= {"SOCKET": f"{outside}/socket", "QUEUE": "4711"}
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as named:
        listener.bind(f"\0branching-test-{os.getpid()}")
        listener.listen()
        named.bind(sandboxed.words["SOCKET"])
        named.listen()
        Path(sandboxed.words["SOCKET"]).chmod(0o777)
        said = sandboxed.python(PYTHON[name])
    assert "ESCAPED" not in said.text, said.text
    assert "Traceback" not in said.text, said.text


def test_a_base_mounted_twice_is_hidden_at_both_places(
    sandboxed: SandboxedBranch, outside: Path
) -> None:
    again = outside / "again"
    again.mkdir()
    subprocess.run(["mount", "--bind", str(sandboxed.pair.base), str(again)], check=True)
    try:
        said = sandboxed.attempt(f"cat '{again}/seed.txt' && echo ESCAPED")
        assert "ESCAPED" not in said.text
    finally:
        subprocess.run(["umount", str(again)], check=True)


def test_a_socket_that_a_container_was_given_is_hidden(
    sandboxed: SandboxedBranch, outside: Path
) -> None:
    """It was made where /proc/net/unix shows another name, or none."""
    place = outside / "given"
    place.touch()
    with tempfile.TemporaryDirectory() as away, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{away}/socket")
        listener.listen()
        Path(away).chmod(0o755)
        Path(away, "socket").chmod(0o777)
        subprocess.run(["mount", "--bind", f"{away}/socket", str(place)], check=True)
        try:
            said = sandboxed.python(
                "import socket\n"
                f"try: socket.socket(socket.AF_UNIX).connect({str(place)!r}); print('ESCAPED')\n"
                "except OSError as error: print(error)"
            )
        finally:
            subprocess.run(["umount", str(place)], check=True)
    assert "ESCAPED" not in said.text
    assert "Permission denied" in said.text


FORGED = "0000000000000000: 00000002 00000000 00010000 0001 01 12345"
"""What a line of /proc/net/unix has before a name."""


@pytest.mark.parametrize(
    "name",
    ["\0a\nx /usr", f"\0a\n{FORGED} /usr", f"\0a\n{FORGED} /proc/self/fd/3", "\0\n /usr/bin/env"],
    ids=["a line", "a whole line", "a descriptor", "a program"],
)
def test_the_name_of_a_socket_hides_no_file(place: Path, name: str) -> None:
    """Anybody may bind any abstract name, a sandboxed process too."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        said = run_in(place, "ls /usr && /usr/bin/env true && echo whole")
    assert said.lines[-1:] == ["whole"], said.text
    assert "bin" in said.lines


def test_a_socket_with_a_newline_in_its_name_is_hidden(place: Path, outside: Path) -> None:
    path = outside / "a\n b"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        path.chmod(0o777)
        said = run_in(
            place,
            f"""python3 -c '
import socket
try: socket.socket(socket.AF_UNIX).connect({json.dumps(str(path))}); print("ESCAPED")
except OSError as error: print(error)
'""",
        )
    assert "Permission denied" in said.text, said.text
    assert "ESCAPED" not in said.text


def test_of_another_mount_only_stores_and_sockets_are_taken_for_private(
    real: Mounted, outside: Path
) -> None:
    """Any user's file system may call itself a BranchFS, and any path private."""
    told = [os.fsdecode(path) for path in os.getxattr(real.root, PRIVATE_XATTR).split(b"\0")]
    assert [rootfs._is_store_or_socket(path) for path in told] == [False, True, True]
    (outside / "format").touch()
    for path in ("/usr", "/", "/etc/passwd", "/usr/bin/python3", str(outside)):
        assert not rootfs._is_store_or_socket(path)


def test_a_directory_is_no_input(place: Path) -> None:
    """It lies in the caller's mounts: all of them can be reached from there."""
    for isolation in ("sandbox", "none"):
        code = (
            "import sys; from branching import BranchContext\n"
            f"with BranchContext(['true'], sys.argv[1], isolation={isolation!r}) as c: c.wait()"
        )
        directory = os.open("/", os.O_RDONLY)
        try:
            done = subprocess.run(
                # The interpreter itself refuses to begin with one.
                [sys.executable, "-c", f"import os; os.dup2({directory}, 0)\n{code}", str(place)],
                pass_fds=[directory],
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            os.close(directory)
        assert (done.returncode == 0) == (isolation == "none"), done.stderr
        assert ("descriptor 0 is a directory" in done.stderr) == (isolation == "sandbox")


class TestLife:
    """Processes that try to outlive the sandbox, exceed its limits or confuse it."""

    @pytest.mark.contract("3.9")
    def test_double_forks_and_sessions_of_their_own_die(self, real: Mounted) -> None:
        space = Workspace(real.root)
        with space.branch("b", on_success=None) as branch:
            script = "for i in 1 2 3; do setsid sh -c '(sleep 600 &) & trap \"\" TERM HUP; sleep 600' & done; sleep 600"
            with BranchContext(["sh", "-c", script], branch) as context:
                with pytest.raises(TimeoutError):
                    context.wait(0.5)
                context.abort(timeout=0.1)
            branch.abort()
        space.close()
        assert processes_in(real.root) == []

    def test_stopped_processes_die(self, place: Path) -> None:
        script = "sleep 600 & kill -STOP $!; kill -STOP $$"
        with BranchContext(["sh", "-c", script], place) as context:
            with pytest.raises(TimeoutError):
                context.wait(0.3)
            context.abort(timeout=1)
            assert not context.alive

    def test_a_fork_bomb_dies(self, place: Path) -> None:
        bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
        limits = ResourceLimits(pids=50)
        with BranchContext([sys.executable, "-c", bomb], place, limits=limits) as context:
            with pytest.raises(TimeoutError):
                context.wait(0.5)
            context.abort(timeout=0.1)
            assert not context.alive

    def test_running_out_of_descriptors_affects_no_other_process(self, place: Path) -> None:
        def exhaust(path: Path) -> int:
            held = []
            try:
                while True:
                    held.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                return len(held)
            finally:
                for number in held:
                    os.close(number)

        with BranchContext(exhaust, place) as context:
            context.wait()
            assert isinstance(context.result.value, int)
            assert context.result.value > 10

    def test_a_thousand_zombies_are_reaped(self, place: Path) -> None:
        script = "i=0; while [ $i -lt 300 ]; do (sleep 0 &) ; i=$((i+1)); done; "
        script += "until [ $(ls -d /proc/[0-9]* | wc -l) -lt 50 ]; do sleep 0.05; done"
        with BranchContext(["sh", "-c", script], place) as context:
            context.wait(60)

    def test_the_death_of_the_caller_ends_everything(self, place: Path) -> None:
        """However it dies: no process remains that could clean up."""
        code = (
            "import sys, time; from branching import BranchContext\n"
            "with BranchContext(['sh', '-c', 'touch up; sleep 600'], sys.argv[1]) as c:\n"
            "    print(c.pid, flush=True); c.wait()"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(place)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout
        pid = int(child.stdout.readline())
        child.kill()
        child.wait()
        child.stdout.close()
        deadline = time.monotonic() + 30
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    @pytest.mark.slow
    def test_hundreds_of_cancelled_runs_leave_nothing(self, place: Path) -> None:
        """The check of mounts, processes and groups after each test is the assertion."""
        files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208

        def cancel(count: int) -> None:
            for _ in range(count):
                with BranchContext(["sleep", "600"], place) as context:
                    context.kill()
                    with pytest.raises(ProcessBranchError):
                        context.wait()

        threads = [threading.Thread(target=cancel, args=(50,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert abs(len(os.listdir("/proc/self/fd")) - files) <= 2  # noqa: PTH208

    def test_a_limited_process_cannot_leave_its_group(self, place: Path) -> None:
        with Cgroup.create(ResourceLimits(memory=64 * MIB)) as scope:
            script = (
                "for f in $(find /sys/fs/cgroup -name cgroup.procs -o -name tasks); do "
                "echo 0 >$f; done; python3 -c 'x = bytearray(200 << 20)'; echo $?"
            )
            with BranchContext(["sh", "-c", script], place, parent_cgroup=scope) as context:
                context.wait()
                assert context.result.memory_peak is not None
                assert context.result.memory_peak <= 64 * MIB
