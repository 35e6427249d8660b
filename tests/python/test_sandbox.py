"""The sandbox around commands: what is seen, what can be written, what is left after."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Mounted
from support.command import branching_argv
from support.sandbox import Said, run_in

from branching import BranchContext, NamespaceError, Workspace
from branching._linux import syscalls
from branching.process.sandbox import Sandbox, errors, fork_server_client, launcher, parent_state
from branching.process.sandbox import seccomp as call_filter


@pytest.fixture
def run(real: Mounted) -> Callable[..., Said]:
    """Runs a shell script in the sandbox of a new branch of a real mount."""

    def run(script: str, **options: Any) -> Said:
        space = Workspace(real.root)
        try:
            with space.branch("b", on_success=None) as branch:
                said = run_in(branch.path, script, **options)
                branch.abort()
                return said
        finally:
            space.close()

    return run


class TestFiles:
    def test_the_branch_is_seen_at_the_workspaces_path(
        self, run: Callable[..., Said], real: Mounted
    ) -> None:
        said = run("pwd; cat seed.txt; echo x > made; echo $TMPDIR")
        assert said.lines == [str(real.root), "seed", "/tmp"]
        assert not (real.base / "made").exists()

    def test_base_and_store_are_hidden(self, run: Callable[..., Said], real: Mounted) -> None:
        said = run(f"ls -A '{real.base}'; test -e '{real.base}/seed.txt'; echo $?")
        assert said.lines[-1] == "1"
        assert len(said.lines) == 1 or "No such file" in said.text

    def test_the_mount_tells_what_to_hide(self, real: Mounted) -> None:
        told = os.getxattr(real.root, "user.branchfs.private").split(b"\0")
        assert told[0] == os.fsencode(real.base)
        assert told[1] == os.fsencode(real.base / ".branching")
        assert Path(os.fsdecode(told[2])).is_socket()
        assert Sandbox.of(real.root).private == tuple(Path(os.fsdecode(path)) for path in told)

    @pytest.mark.parametrize("where", ["/etc", "/usr", "/root", "/run", "/dev", "/sys", "/"])
    def test_all_else_is_read_only(self, run: Callable[..., Said], where: str) -> None:
        said = run(f"touch {where}/branching-was-here; mkdir {where}/branching-too")
        assert said.code != 0
        assert not Path(where, "branching-was-here").exists()
        assert not Path(where, "branching-too").exists()

    @pytest.mark.parametrize("where", ["/tmp", "/var/tmp", "/dev/shm"])
    def test_temporary_files_are_its_own(self, run: Callable[..., Said], where: str) -> None:
        said = run(f"ls -A {where}; echo x > {where}/branching-mine && cat {where}/branching-mine")
        assert said.lines[-1] == "x"
        assert not Path(where, "branching-mine").exists()

    def test_devices_work_and_disks_are_not_there(self, run: Callable[..., Said]) -> None:
        said = run(
            "head -c 3 /dev/zero | wc -c; echo x > /dev/null; head -c 1 /dev/urandom | wc -c;"
            "echo y > /dev/stdout; ls /dev; mknod d b 254 0; test -b d; echo $?"
        )
        assert said.lines[:3] == ["3", "1", "y"]
        assert not {"vda", "sda", "kmsg", "mem", "fuse"} & set(said.lines)
        assert said.lines[-1] == "1"

    def test_a_terminal_can_be_made(self, run: Callable[..., Said]) -> None:
        script = "import pty; pty.spawn(['tty'])"
        assert run(f'python3 -c "{script}"').lines[0].startswith("/dev/pts/")

    def test_hidden_files_are_there_and_cannot_be_read(
        self, run: Callable[..., Said], real: Mounted
    ) -> None:
        (real.base / "deep" / "er").mkdir(parents=True)
        for name in (".env", "deep/.env", "deep/er/.env", "deep/plain", "key.pem"):
            (real.base / name).write_text("secret\n")
        (real.base / "secrets").mkdir()
        (real.base / "secrets" / "one").write_text("secret\n")
        (real.base / "link").symlink_to("secrets/one")
        said = run(
            "cat .env deep/.env deep/er/.env key.pem secrets/one; ls secrets; mv deep moved;"
            "cat moved/er/.env; rm -f .env; chmod 644 .env; ln .env other; cat other; cat link;"
            "cat moved/plain",
            hide=["**/.env", "*.pem", "secrets"],
        )
        assert said.out.count("secret\n") == 1, said.text
        assert (real.base / ".env").read_text() == "secret\n"

    @pytest.mark.parametrize("hide", ["/etc/passwd", "../x", ""])
    def test_a_glob_that_leads_out_is_refused(self, tmp_path: Path, hide: str) -> None:
        with pytest.raises(ValueError, match="not a glob"):
            Sandbox.of(tmp_path, hide=[hide])

    def test_globs_are_a_list(self, tmp_path: Path) -> None:
        with pytest.raises(TypeError, match="sequence"):
            Sandbox.of(tmp_path, hide="**/.env")


class TestPrivileges:
    def test_there_are_none(self, run: Callable[..., Said]) -> None:
        said = run("grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status")
        rows = dict(line.split(":\t") for line in said.lines)
        assert {rows[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
        assert (rows["NoNewPrivs"], rows["Seccomp"]) == ("1", "2")

    @pytest.mark.parametrize(
        "attempt",
        [
            "unshare -U true",
            "unshare -m true",
            "unshare -n true",
            "mount -t tmpfs x /tmp",
            "umount /tmp",
            "umount -l /proc",
            "mount -o remount,rw /",
            "nsenter -t 1 -m true",
            "chroot / true",
            "mknod /tmp/null c 1 3",
            "kill -9 1; sleep 0.2; test ! -e /proc/1",
        ],
    )
    def test_none_can_be_had(self, run: Callable[..., Said], attempt: str) -> None:
        assert run(f"{attempt} && echo done").out == ""

    def test_only_its_own_processes_are_seen(self, run: Callable[..., Said]) -> None:
        said = run("ls -d /proc/[0-9]*; cat /proc/1/environ; ls -l /proc/1/fd /proc/1/root/")
        assert len([line for line in said.lines if line.startswith("/proc/")]) <= 4
        assert "denied" in said.text

    def test_the_filter_can_be_made_for_every_machine_it_knows(self) -> None:
        for machine in ("x86_64", "aarch64"):
            assert len(call_filter.program(machine)) % 8 == 0
        with pytest.raises(KeyError):
            call_filter.program("sparc")

    def test_files_belong_to_the_owner(self, place: Path, as_user: tuple[int, int]) -> None:
        os.chown(place, *as_user)
        said = run_in(place, "id -u; id -g; id -G; touch made $HOME/x; echo $HOME", owner=as_user)
        assert said.lines[:3] == ["12345", "12346", "12346"]
        found = (place / "made").stat()
        assert (found.st_uid, found.st_gid) == as_user
        assert not Path(said.lines[3]).exists()


class TestNetwork:
    SCRIPT = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); "
        "c = socket.create_connection(s.getsockname()); print(len(socket.if_nameindex()))"
    )

    def test_without_a_network_there_is_loopback(self, run: Callable[..., Said]) -> None:
        assert run(f'python3 -c "{self.SCRIPT}"', network=False).lines == ["1"]

    def test_with_the_network_it_is_the_callers(self, run: Callable[..., Said]) -> None:
        assert run("readlink /proc/self/ns/net").lines == [os.readlink("/proc/self/ns/net")]  # noqa: PTH115


class TestFailures:
    @pytest.mark.contract("3.6")
    def test_the_error_on_a_machine_without_namespaces_says_what_to_do(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        failed = {"failed": "clone", "errno": 1}
        monkeypatch.setattr(parent_state, "_may_make_namespaces", lambda _: False)
        error = errors.named(failed)
        assert isinstance(error, NamespaceError)
        assert "nothing ran" in str(error)
        assert 'isolation="none"' in str(error.hint)

    def test_an_unknown_machine_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(syscalls, "MACHINE", "sparc")
        with pytest.raises(NamespaceError, match="sparc"):
            run_in(tmp_path, "true")

    @pytest.mark.contract("3.6")
    def test_a_step_that_fails_is_named(self, tmp_path: Path) -> None:
        """The directory at which the branch is shown cannot be created."""
        with pytest.raises(NamespaceError, match="showing the branch at /proc/no/such"):
            run_in(tmp_path, "true", at="/proc/no/such")


def test_many_concurrent_ones_from_many_threads(place: Path) -> None:
    """A program with threads does not fork itself."""
    codes: list[int] = []

    def work(number: int) -> None:
        codes.append(run_in(place, f"exit {number}").code)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == list(range(40))


def test_a_server_that_was_killed_is_started_again(place: Path) -> None:
    for _ in range(2):
        with BranchContext(lambda _: 3, place) as context:
            context.wait()
            assert context.result.value == 3
        server = fork_server_client._server
        assert server is not None
        server._process.kill()


INIT_BLOCKS = f"/proc/1/status:SigBlk:\t{1 << (signal.SIGCHLD - 1):016x}\n"
"""Init reads that signal from a descriptor."""


def test_a_caller_may_have_blocked_all_signals(place: Path) -> None:
    """The fork server inherits the mask, and would not get SIGCHLD."""
    server = fork_server_client._server
    if server is not None:
        server._process.kill()
        server._process.wait()
    codes: list[object] = []

    def work() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        with BranchContext(lambda _: 3, place) as context:
            context.wait()
            codes.append(context.result.value)
        codes.append(run_in(place, "grep SigBlk /proc/self/status /proc/1/status; exit 4").out)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert codes == [3, "/proc/self/status:SigBlk:\t0000000000000000\n" + INIT_BLOCKS]
    server = fork_server_client._server
    assert server is not None
    status = Path(f"/proc/{server._process.pid}/status").read_text()
    blocked, ignored = (
        int(line.split()[1], 16)
        for line in status.splitlines()
        if line.startswith(("SigBlk", "SigIgn"))
    )
    assert (blocked, ignored >> (signal.SIGTERM - 1) & 1) == (0, 0)


def test_a_branch_can_be_seen_at_the_base_itself(real: Mounted) -> None:
    """With a temporary mount, commands see the directory itself and not the mount."""
    space = Workspace(real.root)
    with (
        space.branch("sibling", on_success=None) as sibling,
        space.branch("b", on_success=None) as branch,
    ):
        script = f"pwd; cat seed.txt; touch made; ls -A '{real.root}'; test -e .branching; echo $?"
        said = run_in(branch.path, script, at=real.base)
        assert [said.lines[0], said.lines[1], said.lines[-1]] == [str(real.base), "seed", "1"]
        assert "sibling" not in said.out
        assert (branch.path / "made").exists()
        branch.abort()
        sibling.abort()
    space.close()


def test_the_message_of_a_sandbox_is_read_though_it_ended_without_listening() -> None:
    line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    with line, theirs:
        theirs.send(b"failed")
        line.send(b"go")
        theirs.close()
        assert launcher._hear(line, time.monotonic() + 60) == (os.getpid(), b"failed")
        assert launcher._hear(line, time.monotonic() + 60) == (None, b"")


IGNORES = """
import ctypes, os, struct, sys
number = {"x86_64": 13, "aarch64": 134}[os.uname().machine]  # rt_sigaction
for ignored in (32, 33, 34):  # two that the C library keeps to itself, and one that anybody may set
    action = struct.pack("QQQQ", 1, 0, 0, 0)  # SIG_IGN
    assert ctypes.CDLL(None).syscall(number, ignored, action, None, 8) == 0
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_a_caller_may_ignore_signals_that_cannot_be_set(real: Mounted) -> None:
    """Some container engines do this."""
    argv = [sys.executable, "-c", IGNORES, *branching_argv("run", "--", "touch", "made")]
    done = subprocess.run(argv, cwd=real.root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (real.base / "made").exists()


def test_files_that_others_remove_meanwhile_do_not_stop_a_sandbox(place: Path) -> None:
    """Sockets and stores that must be covered are created and removed while a sandbox starts."""
    done = threading.Event()
    other = Path(tempfile.mkdtemp(dir="/opt"))  # of what is in /tmp a sandbox sees nothing anyhow

    def come_and_go(number: int) -> None:
        while not done.is_set():
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(f"{other}/{number}")
                (other / str(number)).unlink()

    def mount_and_unmount() -> None:
        (other / "base").mkdir()
        while not done.is_set():
            Workspace.open(other / "base").close()

    threads = [threading.Thread(target=come_and_go, args=(number,)) for number in range(3)]
    threads.append(threading.Thread(target=mount_and_unmount))
    for thread in threads:
        thread.start()
    try:
        for _ in range(40):
            assert run_in(place, "true").code == 0
    finally:
        done.set()
        for thread in threads:
            thread.join()
        shutil.rmtree(other)


def test_nothing_of_the_server_is_open_at_the_end_of_the_process(place: Path) -> None:
    """An interpreter that warns about unclosed files prints no warning."""
    script = """
import atexit, os, sys
from pathlib import Path
atexit.register(lambda: print(fork_server_client._server))  # called last: it was registered first
from branching import BranchContext
from branching.process.sandbox import fork_server_client
with BranchContext(lambda _: None, Path(sys.argv[1])) as context:
    context.wait()
assert fork_server_client._server is not None
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", script, str(place)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("None\n", "")
