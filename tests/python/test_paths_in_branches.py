"""Files of a branch are reached by names that cannot lead out of it, and as their owner."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from branching import Workspace
from branching.fs.confined_dir import ConfinedDir

OURS = (os.getuid(), os.getgid())


@pytest.fixture
def directory(place: Path) -> Path:
    (place / "outside").write_text("secret\n")
    inside = place / "inside"
    inside.mkdir()
    (inside / "sub").mkdir()
    (inside / "sub" / "file").write_text("0123456789")
    (inside / "link").symlink_to("sub/file")
    (inside / "away").symlink_to("../outside")
    (inside / "up").symlink_to("..")
    (inside / "root").symlink_to("/")
    return inside


def test_a_file_is_read_in_parts(directory: Path) -> None:
    tree = ConfinedDir(directory, OURS)
    assert tree.read("sub/file", limit=100) == (b"0123456789", 10)
    assert tree.read("sub/file", offset=3, limit=4) == (b"3456", 10)
    assert tree.read("sub/file", offset=30, limit=4) == (b"", 10)


WAYS_OUT = [
    "../outside",
    "sub/../../outside",
    "away",
    "up/outside",
    "root/etc/passwd",
    "/etc/passwd",
    "link",  # inside, but a link all the same
    "/proc/self/cwd",
]


@pytest.mark.parametrize("path", WAYS_OUT)
def test_no_name_leads_out(directory: Path, path: str) -> None:
    tree = ConfinedDir(directory, OURS)
    with pytest.raises(OSError, match="Errno") as refused:
        tree.read(path, limit=100)
    assert refused.value.errno in (errno.EXDEV, errno.ELOOP)
    before = sorted(directory.parent.rglob("*"))
    with pytest.raises(OSError, match="Errno"):
        tree.write(f"{path}/new" if path in ("up", "root") else path, b"mine")
    assert (directory.parent / "outside").read_text() == "secret\n"
    assert sorted(directory.parent.rglob("*")) == before


@pytest.mark.parametrize("path", ["up/new", "root/tmp/new", "../new", "sub/../../new", "/tmp/new"])
def test_nothing_is_made_outside(directory: Path, path: str) -> None:
    before = sorted(directory.parent.rglob("*"))
    with pytest.raises(OSError, match="Errno"):
        ConfinedDir(directory, OURS).write(path, b"mine")
    assert sorted(directory.parent.rglob("*")) == before


def test_directories_on_the_way_are_made(directory: Path) -> None:
    tree = ConfinedDir(directory, OURS)
    assert tree.write("a/b/c", b"new") is True
    assert (directory / "a/b/c").read_bytes() == b"new"
    assert tree.write("a/b/c", b"newer") is False
    assert (directory / "a/b/c").read_bytes() == b"newer"


@pytest.mark.parametrize("path", ["", ".", "..", "sub/", "sub/.", "a\0b"])
def test_an_invalid_file_name_is_refused(directory: Path, path: str) -> None:
    with pytest.raises(OSError, match="Errno") as refused:
        ConfinedDir(directory, OURS).write(path, b"")
    assert refused.value.errno == errno.EINVAL


def test_mode_and_attributes_stay(directory: Path) -> None:
    file = directory / "sub" / "file"
    file.chmod(0o750)
    os.setxattr(file, "user.mark", b"1")
    tree = ConfinedDir(directory, OURS)
    tree.write("sub/file", b"x")
    assert file.stat().st_mode & 0o7777 == 0o750
    assert os.getxattr(file, "user.mark") == b"1"
    tree.write("sub/file", b"x", is_executable=False)
    assert file.stat().st_mode & 0o7777 == 0o640
    tree.write("sub/file", b"x", is_executable=True)
    assert file.stat().st_mode & 0o7777 == 0o750


def test_a_read_only_file_stays_as_it_is(directory: Path) -> None:
    (directory / "sub" / "file").chmod(0o444)
    with pytest.raises(PermissionError):
        ConfinedDir(directory, OURS).write("sub/file", b"x")
    assert (directory / "sub" / "file").read_text() == "0123456789"


def _fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(("make", "code"), [(_fifo, errno.EINVAL), (Path.mkdir, errno.EISDIR)])
def test_only_files_are_read_and_written(
    directory: Path, make: Callable[[Path], None], code: int
) -> None:
    """Opening a pipe without a writer would block for ever."""
    make(directory / "odd")
    tree = ConfinedDir(directory, OURS)
    for act in (lambda: tree.read("odd", limit=1), lambda: tree.write("odd", b"")):
        with pytest.raises(OSError, match="Errno") as refused:
            act()
        assert refused.value.errno == code
    assert [entry.name for entry in tree.entries(limit=100)[0]] == [
        "away",
        "link",
        "odd",
        "root",
        "sub",
        "up",
    ]


def test_a_listing_has_kinds_and_a_bound(directory: Path) -> None:
    tree = ConfinedDir(directory, OURS)
    entries, is_all = tree.entries("sub", limit=10)
    assert [(each.name, each.kind, each.size) for each in entries] == [("file", "file", 10)]
    assert is_all
    entries, is_all = tree.entries(limit=2)
    assert [(each.name, each.kind) for each in entries] == [
        ("away", "symlink"),
        ("link", "symlink"),
    ]
    assert not is_all


def test_root_acts_as_the_owner(directory: Path, as_user: tuple[int, int]) -> None:
    directory.chmod(0o755)
    (directory / "private").write_text("root's\n")
    (directory / "private").chmod(0o600)
    os.chown(directory / "sub", *as_user)
    tree = ConfinedDir(directory, as_user)
    with pytest.raises(PermissionError):
        tree.read("private", limit=10)
    with pytest.raises(PermissionError):
        tree.write("new", b"")
    tree.write("sub/new/file", b"")
    found = (directory / "sub/new/file").stat()
    assert (found.st_uid, found.st_gid) == as_user
    (directory / "back").write_text("we are root again")
    assert (directory / "back").stat().st_uid == 0


def test_links_that_come_and_go_never_lead_out(directory: Path) -> None:
    """A directory is swapped for a link to where the secret is, as fast as it goes."""
    (directory.parent / "elsewhere").mkdir()
    (directory.parent / "elsewhere" / "file").write_text("secret\n")
    (directory / "trap").symlink_to("../elsewhere")
    names = [os.fsencode(directory / name) for name in ("sub", "trap")]
    exchange = partial(ctypes.CDLL(None).renameat2, -100, names[0], -100, names[1], 2)
    done = threading.Event()
    swaps: list[int] = []

    def swap() -> None:
        while not done.is_set():
            swaps.append(exchange())

    thread = threading.Thread(target=swap)
    thread.start()
    tree = ConfinedDir(directory, OURS)
    seen = set()
    try:
        for _ in range(2000):
            try:
                seen.add(tree.read("sub/file", limit=100)[0])
                tree.write("sub/file", b"0123456789")
            except OSError:
                pass
    finally:
        done.set()
        thread.join()
    assert set(swaps) == {0}
    assert seen <= {b"0123456789"}
    assert (directory.parent / "elsewhere" / "file").read_text() == "secret\n"


def test_a_refused_path_is_reported_by_its_own_name(real_workspace: Workspace) -> None:
    with real_workspace.branch("a", on_success=None) as branch, branch.branch("b", on_success=None):
        tree = ConfinedDir(branch.path, real_workspace.owner)
        with pytest.raises(OSError, match="Read-only") as caught:
            tree.write("made", b"x")
        assert caught.value.filename == "made"
    branch.abort()


def test_it_works_in_a_branch(workspace: Workspace) -> None:
    with workspace.branch("a", on_success=None) as branch:
        tree = ConfinedDir(branch.path, workspace.owner)
        assert tree.read("seed.txt", limit=100)[0] == b"seed\n"
        tree.write("deep/er", b"x")
        assert tree.entries("deep", limit=9)[0][0].name == "er"
        assert (workspace.path / "deep").exists() is False
        branch.abort()
