"""The launcher of commands: its input, and its error messages."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import subprocess
import time
from pathlib import Path

import pytest
from support.sandbox import run_in

from branching import BranchContext, ForkError, NamespaceError
from branching.process import Command, Sandbox
from branching.process.sandbox import seccomp

PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_SECCOMP_GET_FILTER = 0x4206, 0x4207, 0x420C
PTRACE_DETACH = 17

ANY_BYTES = os.fsdecode(b'\xff\xe9 \xc3\xa9"\n\\')


def test_names_of_any_bytes_arrive_unchanged(outside: Path) -> None:
    """Request and reports are JSON, which has no such text."""
    view = outside / ANY_BYTES.replace("\n", "")
    view.mkdir()
    (view / ANY_BYTES).write_text("hidden")
    out: list[bytes] = []
    ended = Command(
        ["sh", "-c", 'printf "%s|%s|%s" "$1" "$WORD" "$PWD"; cat "$1" && exit 3', "sh", ANY_BYTES],
        cwd=view,
        environment={"PATH": os.environ["PATH"], "WORD": ANY_BYTES},
        sandbox=Sandbox.of(view, hide=[ANY_BYTES]),
        stdout=out.append,
        stderr=lambda _: None,
    ).run()
    assert b"".join(out) == os.fsencode(f"{ANY_BYTES}|{ANY_BYTES}|{view}")
    assert ended.exit_code == 1, "the hidden file was read"


def test_a_path_of_any_bytes_is_named_in_the_error(outside: Path) -> None:
    wrong = f"/proc/no {ANY_BYTES}"
    with pytest.raises(NamespaceError, match="showing the branch at") as caught:
        run_in(outside, "true", at=wrong)
    assert caught.value.path == wrong


def test_without_the_program_nothing_runs(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHFS", "/no/such/branchfs")
    with pytest.raises(NamespaceError, match=r"/no/such/branchfs.*nothing ran") as caught:
        run_in(outside, "touch made")
    assert "cargo install" in str(caught.value.hint)
    assert not (outside / "made").exists()


def test_a_program_without_the_command_is_named(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older BranchFS, which ends with an error."""
    monkeypatch.setenv("BRANCHFS", "/bin/false")
    with pytest.raises(ForkError, match="nothing ran") as caught:
        run_in(outside, "true")
    assert "/bin/false" in str(caught.value.hint)


def test_a_command_gets_nothing_that_is_open_by_chance(outside: Path) -> None:
    with (outside / "file").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        said = run_in(outside, "ls -l /proc/self/fd /proc/1/fd 2>&1 | grep -c file")
    assert said.out == "0\n"


def test_a_command_gets_the_limits_of_before(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This program raises its own limit of open files, which must not be inherited."""
    from branching._linux import rlimits

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    monkeypatch.setattr(rlimits, "_before", (77, hard))
    assert run_in(outside, "ulimit -n").out == "77\n"


def test_no_launcher_is_left_as_a_zombie(outside: Path) -> None:
    with BranchContext(["true"], outside) as context:
        assert context._process is not None
        launcher = context._process._started.launcher
        assert launcher is not None
        context.wait()
    assert not Path(f"/proc/{launcher}").exists()


def filters_of(pid: int) -> list[bytes]:
    """Reads the system call filters of a process from the kernel (ptrace(2)); needs root."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    assert libc.ptrace(PTRACE_SEIZE, pid, None, None) == 0, os.strerror(ctypes.get_errno())
    assert libc.ptrace(PTRACE_INTERRUPT, pid, None, None) == 0
    os.waitpid(pid, 0x40000000)  # __WALL: it is traced, and no child
    found: list[bytes] = []
    buffer = ctypes.create_string_buffer(8 * 4096)
    while (count := libc.ptrace(PTRACE_SECCOMP_GET_FILTER, pid, len(found), buffer)) > 0:
        found.append(buffer.raw[: 8 * count])
    end = ctypes.get_errno()
    assert libc.ptrace(PTRACE_DETACH, pid, None, None) == 0, "it would not be reaped"
    assert end in (errno.ENOENT, errno.EINVAL), os.strerror(end)  # no more of them, or none at all
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="reading a filter needs root")
@pytest.mark.parametrize("is_command", [True, False])
def test_commands_and_functions_have_the_same_filter_and_no_other(
    outside: Path, is_command: bool
) -> None:
    own = filters_of_a_child()
    target = ["sleep", "600"] if is_command else lambda _: time.sleep(600)
    with BranchContext(target, outside) as context:
        found = filters_of(context.pid)
    assert found == [seccomp.program(platform.machine()), *own]


def filters_of_a_child() -> list[bytes]:
    """Returns the filters that every process here has; a container may set one."""
    child = subprocess.Popen(["sleep", "600"])
    try:
        return filters_of(child.pid)
    finally:
        child.kill()
        child.wait()
