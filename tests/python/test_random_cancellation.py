"""Very many runs, cancelled at random moments: everything is then as it was before."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest
from conftest import Mounted
from support.groups import groups
from support.traces import processes_in
from support.waiting import until

from branching import BranchContext, ProcessBranchError, ResourceLimits, Workspace
from branching.process.sandbox import fork_server_client

pytestmark = pytest.mark.slow

RUNS = 300 if os.environ.get("BRANCHFS_SOAK") else 30
LATEST_SECONDS = 0.2
"""Of a cancellation after the start: from the first mount of the sandbox to the running program."""
SCRIPTS = (
    "sleep 600",
    "setsid sh -c 'sleep 600 & sleep 600' & sleep 600",
    "(sleep 600 &) ; trap '' TERM; sleep 600",
    "sleep 600 & kill -STOP $!; kill -STOP $$",
    "while :; do sh -c 'echo x >>made'; done",
    "true",
)


def mounted(root: Path) -> list[str]:
    rows = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    return [row for row in rows if str(root).replace(" ", "\\040") in row]


def descriptors() -> list[str]:
    """Returns this process's open descriptors, except for the server's socket."""
    found = []
    kept = (
        {fork_server_client._server.socket.fileno()}
        if fork_server_client._server is not None
        else set()
    )
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            link = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
        except OSError:
            continue  # the one that listed them
        if int(name) not in kept:
            found.append(f"{name} {link}")
    return found


@pytest.mark.timeout(900)
def test_cancelled_at_random_moments_nothing_is_left(real: Mounted) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    limits = ResourceLimits(pids=50)
    before = mounted(real.root), groups(), sorted(descriptors())
    assert before[0]
    space = Workspace(real.root)
    ends: dict[str, int] = {}
    for _ in range(RUNS):
        script = ["sh", "-c", chance.choice(SCRIPTS)]
        with space.branch("run", on_success=None) as branch:
            context = BranchContext(script, branch, limits=chance.choice([None, limits]))
            timer = threading.Timer(chance.uniform(0, LATEST_SECONDS), context.kill)
            timer.start()
            try:
                with context:
                    if chance.random() < 0.8:
                        context.wait()
                    # else: left in the middle, which ends it too
            except ProcessBranchError:
                pass
            finally:
                timer.cancel()
                timer.join()
            how = context.result.ended
            ends[how] = ends.get(how, 0) + 1
            branch.abort()
    print(ends)
    assert ends["cancelled"] > RUNS / 2
    assert space.branches() == []
    space.close()
    until(lambda: not processes_in(real.root), "the end of all processes")
    assert (mounted(real.root), groups(), sorted(descriptors())) == before
