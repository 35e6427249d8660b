"""`branching attempt`: attempts in bases that came as archives, and the cache of these."""

from __future__ import annotations

import json
import os
import signal
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import NAME_FROM, Mounted
from support.command import Running, branching
from support.waiting import until

from branching import ConflictError, Workspace
from branching.cluster.base_cache import BaseCache, digest_of
from branching.cluster.node_guard import start_guard

LOOP = """
set -e
branching() { "$PYTHON" -m branching "$@"; }
branching export -w "$HOME_DIR" --whole -o "$PLACE/base.tar"
for index in 0 1 2; do
    BRANCHING_CACHE="$PLACE/node$((index % 2))" branching attempt --base "$PLACE/base.tar" \
        --out "$PLACE/$index.tar" --index $index --json -- sh -c "$TASK" > "$PLACE/$index.json"
done
branching load -w "$HOME_DIR" best "$PLACE/2.tar"
branching commit -w "$HOME_DIR" best
"""
"""A batch system for three attempts on two machines: each has a cache of its own."""

XATTRS = """
import os
acl = "system.posix_acl_access"
os.setxattr("first", "user.note", b"new")
os.setxattr("script", acl, os.getxattr("listed", acl))
os.removexattr("denied", acl)
"""

TASK = f"""
echo $BRANCHING_ATTEMPT > attempt; echo 0.$BRANCHING_ATTEMPT >&3
chmod 600 script; rm gone; mv directory renamed; mkdir -p new/deep; ln first new/deep/hard
echo more >> listed; mv device null; chmod 700 denied; mkfifo fifo; rm -r old; mkdir old
ln -s nowhere link; truncate -s 64M sparse; echo block | dd of=sparse bs=4k seek=9 conv=notrunc
{sys.executable} -c '{XATTRS}'
"""

HOLE_BYTES = 64 << 20


def make_project(directory: Path) -> None:
    directory.mkdir()
    (directory / "script").write_text("true\n")
    (directory / "script").chmod(0o755)
    (directory / "gone").touch()
    (directory / "directory").mkdir()
    (directory / "directory" / "inside").write_text("inside\n")
    (directory / "first").write_text("linked\n")
    os.link(directory / "first", directory / "second")
    os.setxattr(directory / "first", "user.note", b"kept")
    with (directory / "holes").open("wb") as file:
        file.truncate(HOLE_BYTES)
    for name, mode in (("listed", 0o640), ("denied", 0o000)):
        (directory / name).touch(mode)
        os.setxattr(directory / name, "system.posix_acl_access", acl(user=1234))
    os.mknod(directory / "device", stat.S_IFCHR | 0o620, os.makedev(1, 3))
    os.chown(directory / "device", 1234, 5)
    (directory / "old").mkdir()
    (directory / "old" / "inside").touch()


def acl(*, user: int) -> bytes:
    """Returns an access list in which a user may read, as the kernel has it in an attribute."""
    everybody = 0xFFFFFFFF
    entries = [(1, 6, everybody), (2, 4, user), (4, 4, everybody), (16, 4, everybody)]
    entries.append((32, 0, everybody))
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *each) for each in entries)


def tree(directory: Path) -> dict[str, object]:
    """Returns what is at each path, without times and inode numbers."""
    names: dict[int, list[str]] = {}
    found: dict[str, object] = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if name.startswith(".branching"):
            continue
        status = path.lstat()
        names.setdefault(status.st_ino, []).append(name)
        content: object = None
        if path.is_symlink():
            content = str(path.readlink())
        elif path.is_file():
            content = digest_of(path)
        xattrs = {
            each: os.getxattr(path, each) for each in os.listxattr(path, follow_symlinks=False)
        }
        found[name] = (
            status.st_mode,
            status.st_rdev,
            status.st_uid,
            status.st_gid,
            content,
            sorted(xattrs.items()),
        )
    found["hard links"] = sorted(each for each in names.values() if len(each) > 1)
    return found


@pytest.fixture
def cache(place: Path, monkeypatch: pytest.MonkeyPatch) -> BaseCache:
    monkeypatch.setenv("BRANCHING_CACHE", str(place / "cache"))
    return BaseCache()


@pytest.fixture
def packed(place: Path) -> Path:
    """An archive of a project."""
    make_project(place / "project")
    archive = place / "base.tar"
    done = branching(place / "project", "export", "--whole", "-o", str(archive))
    assert done.code == 0, done
    return archive


def test_a_shell_loop_over_two_directories_commits_what_a_local_call_does(place: Path) -> None:
    local, remote = place / "local", place / "remote"
    make_project(local)
    make_project(remote)
    done = branching(local, "best-of-n", "-n", "3", "--", "sh", "-c", TASK)
    assert done.code == 0, done
    variables = {
        "PYTHON": sys.executable,
        "HOME_DIR": str(remote),
        "PLACE": str(place),
        "TASK": TASK,
    }
    looped = subprocess.run(
        ["sh", "-c", LOOP],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert looped.returncode == 0, looped.stderr
    assert tree(remote) == tree(local)
    assert (remote / "attempt").read_text() == "2\n"
    assert os.getxattr(remote / "first", "user.note") == b"new"
    assert os.listxattr(remote / "denied") == []
    assert (remote / "sparse").stat().st_blocks < 100
    assert (place / "2.tar").stat().st_size < 1 << 20
    answers = [json.loads((place / f"{index}.json").read_text()) for index in range(3)]
    assert [answer["score"] for answer in answers] == [0.0, 0.1, 0.2]
    assert {answer["base"] for answer in answers} == {digest_of(place / "base.tar")}
    for node in ("node0", "node1"):
        (base,) = (place / node / "bases").glob("[0-9a-f]*[0-9a-f]")
        assert (base / "gone").exists(), "a base stays as it was"
        assert (base / "holes").stat().st_blocks < 100


def test_a_layer_is_not_loaded_over_what_was_edited_meanwhile(real: Mounted, place: Path) -> None:
    layer = place / "layer.tar"
    words = ("attempt", "--base", str(real.base), "--out", str(layer), "--")
    assert branching(place, *words, "sh", "-c", f"echo mine >> {NAME_FROM}").code == 0
    assert (real.base / NAME_FROM).read_text() == "seed\n"
    (real.base / NAME_FROM).write_text("edited\n")
    with Workspace(real.root) as space, layer.open("rb") as file:
        anchor = space.branch("anchor", on_success=None).__enter__()
        with pytest.raises(ConflictError) as raised:
            anchor.load("winner", file)
        assert raised.value.paths == (NAME_FROM,)
        anchor.abort()


def test_an_attempt_starts_from_layers(real: Mounted, place: Path) -> None:
    first, second = place / "first.tar", place / "second.tar"
    base = ("attempt", "--base", str(real.base))
    assert branching(place, *base, "--out", str(first), "--", "sh", "-c", "echo 1 > a").code == 0
    script = "cat a > b; echo 2 > a"
    words = ("--layer", str(first), "--out", str(second), "--", "sh", "-c", script)
    assert branching(place, *base, *words).code == 0
    with Workspace(real.root) as space, first.open("rb") as one, second.open("rb") as two:
        assert space.branches() == []
        parent = space.load("parent", one)
        child = parent.load("child", two)
        assert (child.path / "a").read_text() == "2\n"
        assert (child.path / "b").read_text() == "1\n"
        parent.abort()


def test_a_failure_and_a_refusal_leave_no_layer(real: Mounted, place: Path) -> None:
    layer = place / "layer.tar"
    words = ("attempt", "--base", str(real.base), "--out", str(layer))
    assert branching(place, *words, "--", "sh", "-c", "touch made; exit 7").code == 7
    assert branching(place, *words, "--timeout", "0.2", "--", "sleep", "60").code == 124
    assert branching(place, *words, "--", "no-such-program").code == 127
    assert not layer.exists()
    layer.write_text("mine")
    assert branching(place, *words, "--", "true").code == 125
    assert layer.read_text() == "mine"
    assert branching(place, "attempt", "--", "true").code == 2


def test_the_wrapper_is_refused_it_would_lose_the_layer(place: Path) -> None:
    words = ["attempt", "--base", str(place), "--out", str(place / "1.tar"), "--", "true"]
    outside = {"BRANCHING_COMMAND_NAME": "branching-docker", "BRANCHING_HOST_WORKSPACE": "/home/x"}
    done = branching(place, *words, **outside)
    assert done.code == 2, done
    assert "use branching on the host" in done.err
    assert not (place / "1.tar").exists()


def test_an_interrupted_attempt_leaves_no_layer_and_no_branch(real: Mounted, place: Path) -> None:
    layer = place / "layer.tar"
    words = ["attempt", "--json", "--base", str(real.base), "--out", str(layer)]
    run = Running(place, [*words, "--", "sh", "-c", "echo up >&2; sleep 600"])
    run.wait_for_line("up")
    run.signal(signal.SIGINT)
    done = run.done()
    assert (done.code, done.out) == (130, "")
    assert not layer.exists()
    with Workspace(real.root) as space:
        assert space.branches() == []


def test_the_next_attempt_drops_the_branch_of_one_that_was_killed(
    real: Mounted, place: Path
) -> None:
    first = place / "first.tar"
    base = ["attempt", "--base", str(real.base)]
    assert branching(place, *base, "--out", str(first), "--", "touch", "made").code == 0
    words = [*base, "--layer", str(first), "--out", str(place / "killed.tar")]
    run = Running(place, [*words, "--", "sh", "-c", "echo up >&2; sleep 600"])
    run.wait_for_line("up")
    run.signal(signal.SIGKILL)
    run.done()
    assert branching(place, *base, "--out", str(place / "next.tar"), "--", "touch", "a").code == 0
    with Workspace(real.root) as space:
        assert space.branches() == []


def test_excluded_files_are_not_in_the_base_archive(place: Path, cache: BaseCache) -> None:
    make_project(place / "project")
    (place / "project" / ".env").write_text("TOKEN=1\n")
    archive = place / "base.tar"
    words = ("export", "--whole", "--exclude", ".env", "-o", str(archive))
    assert branching(place / "project", *words).code == 0
    assert b"TOKEN" not in archive.read_bytes()
    with cache.unpacked(archive) as base:
        assert not (base / ".env").exists()
        assert (base / "script").exists()


def test_a_base_in_use_is_not_removed(packed: Path, cache: BaseCache) -> None:
    digest = digest_of(packed)
    with cache.unpacked(packed) as base:
        assert cache.prune() == (0, 0)
        assert (base / "script").exists()
    removed, size = cache.prune()
    assert (removed, size > 0) == (1, True)
    assert not cache.has(digest)
    with cache.unpacked(packed):
        assert cache.has(digest)
    assert branching(packed.parent, "prune", "--bases").code == 0
    assert list((packed.parent / "cache" / "bases").iterdir()) == []


def test_the_base_unused_for_longest_is_removed_first(
    place: Path, packed: Path, cache: BaseCache
) -> None:
    (place / "project" / "more").write_text("more\n")
    other = place / "other.tar"
    assert branching(place / "project", "export", "--whole", "-o", str(other)).code == 0
    for archive in (other, packed):
        with cache.unpacked(archive):
            pass
    with BaseCache(bytes_max=0).unpacked(other):
        pass  # it is there: nothing is added, so nothing is removed
    one = digest_of(packed)
    os.utime(place / "cache" / "bases" / f"{one}.lock", (1, 1))
    sizes = [int(lock.read_text()) for lock in (place / "cache" / "bases").glob("*.lock")]
    assert cache.prune(sum(sizes) - 1)[0] == 1
    assert not cache.has(one)
    assert cache.has(digest_of(other))


def test_a_mount_is_used_by_its_guard_before_the_guard_is_up(
    packed: Path, cache: BaseCache, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short attempt ends meanwhile: the base is not unmounted and mounted again, but once."""
    with cache.unpacked(packed):
        pass
    os.mkfifo(place / "go")
    late = place / "late-python"
    late.write_text(f'#!/bin/sh\n(read go <"{place}/go"; exec {sys.executable} "$@") &\n')
    late.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(late))
    with cache.unpacked(packed) as base, Workspace.open(base) as space:
        start_guard(cache, digest_of(packed), space)
    assert space.path.is_mount()
    (place / "go").write_text("go\n")
    until(lambda: not space.path.exists(), "the guard has unmounted the base")


KILLED_WHILE_UNPACKING = """
import os, pathlib, signal, sys
from branching.cluster.base_cache import BaseCache
from branching.fs import Workspace
Workspace.load = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
with BaseCache(pathlib.Path(sys.argv[2])).unpacked(pathlib.Path(sys.argv[1])):
    pass
"""


def test_a_kill_during_unpacking_leaves_no_mount_and_no_directory(
    packed: Path, cache: BaseCache
) -> None:
    """Goal: no `with` runs, so another process has to clean up. Traces are also the fixture's."""
    words = [sys.executable, "-c", KILLED_WHILE_UNPACKING, str(packed), str(cache.directory)]
    assert subprocess.run(words, check=False).returncode == -signal.SIGKILL
    bases = cache.directory / "bases"
    until(lambda: not [each for each in bases.iterdir() if each.is_dir()], "no directory is left")


def test_an_archive_that_cannot_be_unpacked_leaves_nothing(place: Path, cache: BaseCache) -> None:
    archive = place / "bad.tar"
    archive.write_bytes(b"no archive" * 100)
    done = branching(
        place, "attempt", "--base", str(archive), "--out", str(place / "out"), "--", "true"
    )
    assert done.code == 125
    assert "archive" in done.err
    assert [path.suffix for path in (place / "cache" / "bases").iterdir()] == [".lock"]
