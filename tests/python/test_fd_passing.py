"""Open files on their way between programs: the kernel has room for so many of a user's."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import Mounted

from branching import BranchContext, ForkError, Workspace
from branching._linux import fd_passing
from branching.process.sandbox import fork_server_client

FULL = """
import errno, os, resource, socket, sys
from branching._linux import fd_passing

os.setresuid({uid}, {uid}, {uid})  # root has room for any number
others, others_end = socket.socketpair()
ours, its = socket.socketpair()
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
socket.send_fds(others, [b"x"], [0] * 20)
try:
    socket.send_fds(ours, [b"x"], [0])
    sys.exit("there is room")
except OSError as error:
    assert error.errno == errno.ETOOMANYREFS, error

pauses = []
def wait(seconds):
    pauses.append(seconds)
    if len(pauses) == 3:
        others_end.recv(1)  # and what came along is gone
fd_passing.time.sleep = wait

fd_passing.send(ours, b"hello", [0])
message, descriptors, _, _ = socket.recv_fds(its, 64, 1)
print(message, len(descriptors), len(pauses))
"""


def test_it_waits_until_the_other_receivers_have_their_descriptors(
    as_user: tuple[int, int],
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL.format(uid=as_user[0])],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "b'hello' 1 3\n", done.stderr


def wait_for_go(path: Path) -> None:
    while not (path / "go").exists():
        time.sleep(0.02)


def test_where_there_is_never_room_nothing_runs_and_others_run_on(
    real: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server would not help, and the end of this one is that of all it has started."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))

    with Workspace(real.root) as space, space.branch("b", on_success=None) as branch:
        with BranchContext(wait_for_go, branch) as context:
            monkeypatch.setattr(socket, "send_fds", refuse)
            monkeypatch.setattr(fd_passing, "WAIT_SECONDS_MAX", 0.0)
            before = fork_server_client._server
            with (
                pytest.raises(ForkError, match="in transit between programs"),
                BranchContext(lambda path: (path / "ran").touch(), branch),
            ):
                pass
            assert fork_server_client._server is before
            (branch.path / "go").touch()
            context.wait(60)
        assert not (branch.path / "ran").exists()
        branch.abort()
