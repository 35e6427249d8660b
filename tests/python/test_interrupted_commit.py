"""A commit that was interrupted: `strace` kills the daemon in the middle of it, after its guard."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import quote

import pytest
from support.branchfs import find_program
from support.command import branching

FILES = 40


def wait_until(what: str, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def children(process: int) -> list[int]:
    lists = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for path in lists for child in path.read_text().split()]


def is_guard(process: int) -> bool:
    return b"--guard" in Path(f"/proc/{process}/cmdline").read_bytes()


@pytest.fixture
def interrupted(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with old and new files, and no process that recovers it."""
    program = find_program()
    monkeypatch.setenv("BRANCHFS", program)
    base, root = place / "base", place / "mount"
    base.mkdir()
    root.mkdir()
    for number in range(FILES):
        (base / str(number)).write_text("old")
    subprocess.run([program, "mount", "--base", base, root], check=True)
    subprocess.run([program, "create", "work", root], check=True, stdout=subprocess.DEVNULL)
    for number in range(FILES):
        (root / "@work" / str(number)).write_text("new")
    daemon = int(Path(os.fsdecode(os.getxattr(root, "user.branchfs.control"))).stem)
    wait_until("the guard runs", lambda: any(is_guard(child) for child in children(daemon)))
    (guard,) = children(daemon)
    os.kill(guard, signal.SIGKILL)
    inject = ["-e", "trace=renameat2", "-e", "inject=renameat2:signal=KILL:when=20"]
    strace = subprocess.Popen(
        ["strace", "-f", "-o", "/dev/null", "-p", str(daemon), *inject], stderr=subprocess.DEVNULL
    )

    def is_attached() -> bool:
        threads = Path(f"/proc/{daemon}/task").iterdir()
        return all("TracerPid:\t0\n" not in (each / "status").read_text() for each in threads)

    wait_until("strace attaches", is_attached)
    done = subprocess.run([program, "commit", "work", root], capture_output=True, check=False)
    assert done.returncode != 0
    strace.wait(60)
    yield base
    subprocess.run(["umount", "-l", root], capture_output=True, check=False)


def contents(base: Path) -> set[str]:
    return {(base / str(number)).read_text() for number in range(FILES)}


@pytest.mark.skipif(shutil.which("strace") is None or os.geteuid() != 0, reason="strace, as root")
def test_doctor_and_status_report_it_until_it_is_recovered(interrupted: Path) -> None:
    root = interrupted.parent / "mount"
    gone = branching(interrupted.parent, "ls", "-w", str(root))
    assert f"Hint: `branchfs log {quote(str(interrupted))}` prints its log" in gone.err, gone
    subprocess.run(["umount", "-l", root], check=True)
    assert contents(interrupted) == {"old", "new"}

    def journal_and_log() -> tuple[str, str, str]:
        checks = branching(interrupted, "doctor", "--json").document["checks"]
        found = {check["name"]: check for check in checks}
        journal = found["journal"]
        return journal["state"], journal["hint"], found["log"]["detail"]

    state, hint, log = journal_and_log()
    assert state == "limited"
    assert hint.startswith(f"branchfs recover {quote(str(interrupted))};")
    assert log.startswith(f"{interrupted}/.branching/branchfs.log; ")
    assert contents(interrupted) == {"old", "new"}, "doctor looks and changes nothing"

    shown = branching(interrupted, "status")
    assert (
        f"recovered: a commit was interrupted, which left old and new files in {interrupted}"
        in shown.out
    )
    assert len(contents(interrupted)) == 1
    assert "recovered" not in branching(interrupted, "status").out
    assert journal_and_log()[0] == "ok"


@pytest.mark.skipif(shutil.which("strace") is None or os.geteuid() != 0, reason="strace, as root")
def test_the_document_of_status_says_that_it_was_recovered(interrupted: Path) -> None:
    subprocess.run(["umount", "-l", interrupted.parent / "mount"], check=True)
    assert branching(interrupted, "status", "--json").document["recovered"] is True
    assert branching(interrupted, "status", "--json").document["recovered"] is False
