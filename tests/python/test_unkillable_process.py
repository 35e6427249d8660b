"""A process that hangs in the kernel and does not die when killed: waited for, but not for ever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.branchfs import find_program

HANGS = """
import sys, threading
from pathlib import Path
from branching import BranchContext, ProcessBranchError
from branching.process import Command, sandboxed_process, unsandboxed
from support.hanging import HangingMount

way, work, point = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
sandboxed_process.REAP_SECONDS_MAX = unsandboxed.REAP_SECONDS_MAX = 0.5
words = ["sh", "-c", f"stat {point}/x & wait"] if way == "child" else ["stat", f"{point}/x"]
mount = HangingMount(point)

def said(run):
    try:
        run()
    except ProcessBranchError as error:
        print(error.hint, flush=True)
        print(error, flush=True)

try:
    if way == "plain":
        command = Command(words, cwd=work, environment={"PATH": "/usr/bin:/bin"})
        runner = threading.Thread(target=said, args=[command.run])
        runner.start()
        assert mount.is_asked.wait(60)
        command.kill()
        runner.join()
    else:
        isolation = "none" if way == "no sandbox" else "sandbox"
        with BranchContext(words, work, isolation=isolation) as context:
            assert mount.is_asked.wait(60)
            said(lambda: context.abort(0.1))
            said(context.wait)
            assert not context.alive
finally:
    mount.let_go()
print("over")
"""


@pytest.mark.parametrize("way", ["sandbox", "child", "no sandbox", "plain"])
def test_it_is_waited_for_with_a_bound(outside: Path, way: str) -> None:
    """Runs in a mount namespace of its own: another process that read that mount would hang too."""
    point = outside / "hanging"
    work = outside / "work"
    point.mkdir()
    work.mkdir()
    support = str(Path(__file__).parent)
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", HANGS, way, str(work), str(point)],
        env={
            "PYTHONPATH": f"{support}:{Path(support).parents[1]}",
            "PATH": "/usr/bin:/bin",
            "BRANCHFS": str(find_program()),
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    hint, said, *more = done.stdout.splitlines()
    assert "does not die" in said
    assert hint.startswith("see /proc/")
    assert more[-1] == "over"
