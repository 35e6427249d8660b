"""A store from an untrusted source: no link, FIFO or device in it leads out of it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import Mounted
from support.command import branching

from branching import Workspace
from branching.agent.errors import ForkStateError, ForkStoreError
from branching.agent.fork_store import SQLiteForkStateStore
from branching.cli.fork_registry import ForkRegistry
from branching.cli.fork_registry import orphaned_forks as left_forks
from branching.errors import BranchingError, MountError
from branching.fs.branch_leases import BranchLeases, orphaned_branches
from branching.fs.branchfs import CONTROL_XATTR, read_control_path
from branching.fs.store_files import open_file, read
from branching.fs.unmounted_store import is_interrupted, log_of
from branching.process.sandbox.config import PRIVATE_XATTR, Sandbox
from branching.runlog.control_socket import is_alive
from branching.runlog.events import Event
from branching.runlog.run_log import RunLog, forget, lost, read_entries, read_entry

SECRET = "outside-secret"

PLANTS: dict[str, Callable[[Path, Path], None]] = {
    "a link to a file": lambda name, outside: name.symlink_to(outside / "secret"),
    "a link to an empty file": lambda name, outside: name.symlink_to(outside / "empty"),
    "a link to a directory": lambda name, outside: name.symlink_to(outside / "room"),
    "a FIFO": lambda name, _: os.mkfifo(name),
    "a device": lambda name, _: os.mknod(name, 0o20600, os.makedev(1, 3)),
    "a hard link to a file": lambda name, outside: name.hardlink_to(outside / "secret"),
    "a hard link to an empty file": lambda name, outside: name.hardlink_to(outside / "empty"),
}


@pytest.fixture
def beside(place: Path) -> Iterator[Path]:
    """A directory outside of the store."""
    beside = place / "beside"
    (beside / "room").mkdir(parents=True)
    entry = {"branch": "planted", "command": "run", "index": 0, "label": SECRET}
    entry |= {"state": "done", "started": 1.0}
    (beside / "secret").write_text(json.dumps(entry) + "\n")
    for name in ("empty", "room/mine.log", "room/claims-1"):
        (beside / name).write_text("")
    (beside / "room/mine.json").write_text(json.dumps(entry))
    yield beside
    shutil.rmtree(beside)


def state(directory: Path) -> dict[str, tuple[bytes, int, int]]:
    """Names, contents, owners and modes below a directory."""
    return {
        str(path.relative_to(directory)): (
            path.read_bytes() if path.is_file() else b"",
            path.lstat().st_uid,
            path.lstat().st_mode,
        )
        for path in sorted(directory.rglob("*"))
    }


def fill(space: Workspace) -> None:
    """Writes what the library and its commands keep in a store."""
    assert space.store is not None
    kept = (
        "run",
        "-q",
        "-b",
        "mine",
        "--on-success",
        "keep",
        "--",
        "sh",
        "-c",
        "echo said; touch x",
    )
    assert branching(space.root, *kept).code == 0
    leases = BranchLeases(space)
    leases.add(space.branches()[0])
    file = leases._file
    assert file is not None
    os.close(file)  # as when its process is killed
    with ForkRegistry(space) as forks:
        assert not forks.complaint
        (space.store / "agents" / "fork-1").touch()


def use(space: Workspace) -> list[object]:
    """Does what commands do with these files; returns what they would show."""
    assert space.store is not None
    logs = space.store / "logs"
    shown: list[object] = [*read_entries(logs), *lost(logs), *orphaned_branches(space)]
    with RunLog.of(space, "run") as book:
        on_event = book.and_then(lambda _: None)
        on_event(Event(kind="resumed", branch="mine", index=0))
        on_event(Event(kind="output", branch="mine", index=0, text="line"))
    with suppress(OSError):
        shown.append(read(logs / "mine.log"))
    with suppress(BranchingError), ForkRegistry(space):
        shown.append(left_forks(space))
    with suppress(OSError):
        forget(logs)
    return shown


def test_no_foreign_file_among_logs_and_agents_leads_out_of_the_store(
    real: Mounted, beside: Path
) -> None:
    with Workspace(real.root) as space:
        assert space.store is not None
        store = space.store
        fill(space)
        kept = store.parent / "kept"
        names = [name for place in ("logs", "agents") for name in (store / place).rglob("*")]
        assert {"mine.json", "mine.log", "forks.sqlite"} <= {name.name for name in names}
        for place in ("logs", "agents"):
            shutil.copytree(store / place, kept / place)
        before = state(beside)
        for name in (store / "logs", store / "agents", *names):
            for what, plant in PLANTS.items():
                when = f"{what} at {name.relative_to(store)}"
                for place in ("logs", "agents"):
                    if (store / place).is_dir() and not (store / place).is_symlink():
                        shutil.rmtree(store / place)
                    else:
                        (store / place).unlink(missing_ok=True)
                    shutil.copytree(kept / place, store / place)
                if name.is_dir():
                    shutil.rmtree(name)
                else:
                    name.unlink()
                plant(name, beside)
                assert SECRET not in repr(use(space)), when
                assert state(beside) == before, when
        space.reopen("mine").abort()


def test_the_log_of_a_candidate_is_not_printed_through_a_link(real: Mounted, beside: Path) -> None:
    with Workspace(real.root) as space:
        assert space.store is not None
        fill(space)
        log = space.store / "logs" / "mine.log"
        log.unlink()
        log.symlink_to(beside / "secret")
        done = branching(real.root, "log", "mine")
        assert done.code != 0
        assert SECRET not in done.out + done.err
        assert str(log) in done.err
        space.reopen("mine").abort()


def test_an_entry_or_a_state_that_names_another_place_is_ignored(
    real: Mounted, beside: Path
) -> None:
    logs = beside / "logs"
    logs.mkdir()
    fields = {"command": "run", "index": 0, "label": "", "state": "running", "started": 1.0}
    for branch, door in (
        ("../secret", ""),
        ("/etc/passwd", ""),
        ("mine", "/run/x"),
        ("mine", "../x"),
    ):
        (logs / "mine.json").write_text(json.dumps({**fields, "branch": branch, "door": door}))
        assert read_entries(logs) == []
    (logs / "mine.json").write_text(json.dumps({**fields, "branch": "mine", "door": "a.door"}))
    assert [entry.branch for entry in read_entries(logs)] == ["mine"]
    (logs / "a.door").symlink_to("/dev/log")
    assert not is_alive(logs / "a.door")
    with Workspace(real.root) as space, ForkRegistry(space) as forks:
        with pytest.raises(ForkStateError, match="names no lock"):
            forks._take("../../beside/made")
        assert not (beside / "made").exists()


def test_a_database_is_not_opened_through_a_link(beside: Path) -> None:
    for name in ("forks.sqlite", "forks.sqlite-wal"):
        agents = beside / "agents"
        agents.mkdir()
        (agents / name).symlink_to(beside / "empty")
        with pytest.raises(ForkStoreError, match=r"forks\.sqlite"):
            SQLiteForkStateStore(agents / "forks.sqlite")
        assert (beside / "empty").read_bytes() == b""
        shutil.rmtree(agents)
    (beside / "agents").symlink_to(beside / "room")
    with pytest.raises(ForkStoreError):
        SQLiteForkStateStore(beside / "agents" / "forks.sqlite")
    assert not (beside / "room" / "forks.sqlite").exists()


def test_queries_without_a_mount_follow_no_symbolic_link(beside: Path) -> None:
    base = beside / "base"
    (base / ".branching").mkdir(parents=True)
    (beside / "room/journal/1").mkdir(parents=True)
    (beside / "room/lock").touch()
    (beside / "room/branchfs.log").touch()
    (base / ".branching" / "store").symlink_to(beside / "room")
    assert log_of(base) is None
    (base / ".branching" / "journal").symlink_to(beside / "room/journal")
    (base / ".branching" / "lock").touch()
    assert not is_interrupted(base)
    (base / ".branching" / "journal").unlink()
    (base / ".branching" / "journal" / "1").mkdir(parents=True)
    assert is_interrupted(base)
    (base / ".branching" / "lock").unlink()
    os.mkfifo(base / ".branching" / "lock")
    assert not is_interrupted(base)


def test_only_a_plain_file_is_opened(beside: Path) -> None:
    (beside / "through").symlink_to("room")
    (beside / "room" / "plain").write_text("content")
    assert read(beside / "room" / "plain") == b"content"
    for what, plant in PLANTS.items():
        plant(beside / "planted", beside)
        for flags in (os.O_RDONLY, os.O_WRONLY | os.O_APPEND | os.O_CREAT):
            with pytest.raises(OSError, match="planted"):
                open_file(beside / "planted", flags)
        assert read_entry(beside / "planted") is None, what
        (beside / "planted").unlink()
    with pytest.raises(OSError, match="through"):
        open_file(beside / "through" / "plain")
    assert subprocess.run(["ls", beside / "through"], check=True, capture_output=True).stdout


def test_a_forged_attribute_makes_no_directory_a_mount(real: Mounted, beside: Path) -> None:
    """Not a plain directory, not a foreign mount whatever its source, and not a directory of a
    BranchFS that is mounted elsewhere."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(beside / "socket"))
    listening.listen()
    listening.setblocking(False)
    plain, foreign, bound = (beside / name for name in ("plain", "foreign", "bound"))
    for directory in (plain, foreign, bound):
        directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "branchfs", foreign], check=True)
    with Workspace(real.root) as space, space.branch("holder") as branch:
        inside = branch.path / "inside"
        inside.mkdir()
        subprocess.run(["mount", "--bind", inside, bound], check=True)
        try:
            for directory in (plain, foreign, inside):
                os.setxattr(directory, CONTROL_XATTR, os.fsencode(beside / "socket"))
                os.setxattr(directory, PRIVATE_XATTR, os.fsencode(f"{directory}\0{beside}/hidden"))
            for directory in (plain, foreign, bound):
                with pytest.raises(OSError, match="no BranchFS is mounted"):
                    read_control_path(directory)
                with pytest.raises(MountError):
                    Workspace(directory)
                sandbox = Sandbox.of(directory)
                assert beside / "hidden" not in sandbox.private, directory
            assert real.root == Sandbox.of(branch.path).at
            with pytest.raises(BlockingIOError):
                listening.accept()
        finally:
            subprocess.run(["umount", foreign, bound], check=True)
    listening.close()
