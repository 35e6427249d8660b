"""The init that is forked ahead: it serves the next request, and knows nothing of the last."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.waiting import until

from branching import BranchContext
from branching.process.sandbox import Isolation, fork_server_client


def children_of(pid: int) -> list[int]:
    with suppress(FileNotFoundError):
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    return []


def server() -> int:
    assert fork_server_client._server is not None
    return fork_server_client._server._process.pid


def prefork() -> int:
    """Waits for the only child of the server: no sandbox runs."""
    until(lambda: len(children_of(server())) == 1 and is_waiting(children_of(server())[0]), "one")
    return children_of(server())[0]


def is_waiting(pid: int) -> bool:
    """Whether it has done what it does ahead."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def call(place: Path, **options: Any) -> object:
    """Runs a function in a sandbox: only these are forked from the server."""
    with BranchContext(options.pop("target", lambda _: None), place, **options) as context:
        context.wait()
        return context.result.value


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def memory_of(pid: int) -> bytes:
    """Reads what the process has written, and may write, of its memory."""
    found = b""
    rows = Path(f"/proc/{pid}/maps").read_text().splitlines()
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for begin, end in re.findall(r"^([0-9a-f]+)-([0-9a-f]+) rw", "\n".join(rows), re.MULTILINE):
            memory.seek(int(begin, 16))
            found += memory.read(int(end, 16) - int(begin, 16))
    return found


@pytest.mark.parametrize("isolation", ["sandbox", "none"])
def test_it_serves_the_next_request(tmp_path: Path, isolation: Isolation) -> None:
    call(tmp_path, isolation=isolation)
    ready = prefork()
    with BranchContext(lambda _: time.sleep(600), tmp_path, isolation=isolation) as second:
        assert parent_of(second.pid) == ready
        until(lambda: len(children_of(server())) == 2, "another spare beside the one in use")


def test_it_holds_nothing_of_an_earlier_request(tmp_path: Path) -> None:
    token = os.urandom(16).hex()
    call(tmp_path, target=lambda _: token, env={f"NAME_{token}": token})
    found = memory_of(prefork())
    assert b"/proc/self/mountinfo" in found  # this is how memory looks: text is found
    assert token.encode() not in found


def test_it_has_no_file_open_but_the_line_to_the_server(tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        with BranchContext(lambda _: None, tmp_path) as context:
            context.wait()
        links = [os.readlink(entry) for entry in Path(f"/proc/{prefork()}/fd").iterdir()]  # noqa: PTH115
    assert sorted(re.sub(r"\d", "", link) for link in links) == [*["/dev/null"] * 3, "socket:[]"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_mount_made_after_the_fork_is_seen(outside: Path) -> None:
    place, later = outside / "place", outside / "later"
    place.mkdir()
    later.mkdir()
    call(place)
    ready = prefork()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(later)], check=True)
    try:
        (later / "file").write_text("seen\n")
        assert call(place, target=lambda _: (later / "file").read_text()) == "seen\n"
    finally:
        subprocess.run(["umount", str(later)], check=True)
    assert is_gone(ready)


def test_one_that_died_is_replaced(tmp_path: Path) -> None:
    call(tmp_path)
    dead = prefork()
    os.kill(dead, signal.SIGKILL)
    until(lambda: is_gone(dead), "its end is noticed")
    call(tmp_path)
    assert prefork() != dead


def test_an_unsuitable_fork_server_is_ended_and_replaced(tmp_path: Path) -> None:
    call(tmp_path)
    unfit = prefork()
    call(tmp_path, isolation="none")
    until(lambda: is_gone(unfit), "it has ended")
    assert prefork() != unfit


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_the_server(tmp_path: Path, number: int) -> None:
    call(tmp_path)
    orphan = prefork()
    os.kill(server(), number)
    until(lambda: is_gone(orphan), "it has ended")


def test_a_caller_that_waits_for_the_server_finds_no_spare_process(tmp_path: Path) -> None:
    """For want of work the server ends, and it ends last."""
    call(tmp_path)
    last = prefork()
    assert fork_server_client._server is not None
    fork_server_client._server._process.wait(60)
    assert is_gone(last)
