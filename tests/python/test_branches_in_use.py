"""A branch in which something runs is committed by no process, and rebased by none.

Method: each kind of program that runs commands in branches runs one, in a process of its own, and
another process tries to commit the branch.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.branchfs import find_program
from support.command import branching, branching_argv
from support.waiting import until

from branching import (
    BranchContext,
    BranchError,
    CommitError,
    ProcessBranchError,
    Workspace,
)

SECONDS_MAX = 60
HALF = "echo 1 >half1; echo 2 >other; exec sleep 600"
"""A command that has done one part of its work."""
HOLDERS = {
    "run": ["run", "-b", "work", "--", "sh", "-c", HALF],
    "shell": ["shell", "work", "--", "sh", "-c", HALF],
    "race": ["speculate", "-c", HALF],
    "fork": ["fork", "-c", HALF],
    "tests": ["fork", "--test-command", HALF, "-c", "true"],
    "mcp": ["mcp"],
}


@pytest.fixture
def project(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BRANCHFS", find_program())
    path = place / "project"
    path.mkdir()
    return path


def mcp_messages(name: str) -> str:
    """A client's messages that run the command in a branch."""
    about = {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    }
    run = {"name": "branch_run", "arguments": {"branch": name, "command": HALF}}
    messages: list[dict[str, Any]] = [
        {"id": 1, "method": "initialize", "params": about},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": run},
    ]
    return "".join(json.dumps({"jsonrpc": "2.0", **each}) + "\n" for each in messages)


@contextmanager
def running(project: Path, kind: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Runs the command by a program of that kind; yields the process and the branch's name."""
    if kind in ("shell", "mcp"):
        kept = branching(project, "run", "-b", "work", "--on-success", "keep", "--", "touch", "a")
        assert kept.code == 0, kept.err
    process = subprocess.Popen(
        branching_argv(*HOLDERS[kind]),
        cwd=project,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        if kind == "mcp":
            assert process.stdin
            process.stdin.write(mcp_messages("work"))
            process.stdin.flush()
        until(
            lambda: (
                process.poll() is not None or any(project.glob(".branching/layers/*/upper/other"))
            ),
            "the first part of the command",
        )
        assert process.poll() is None, "it ended by itself"
        yield process, next(iter(changed(project, "other")))
    finally:
        process.kill()
        process.communicate(timeout=SECONDS_MAX)


def changed(project: Path, path: str) -> list[str]:
    """The open branches that have a path."""
    document = branching(project, "ls", "--json").document
    return [each["name"] for each in document["branches"] if (Path(each["path"]) / path).exists()]


@pytest.mark.parametrize("kind", HOLDERS)
def test_another_process_commits_it_only_after_the_end_of_what_runs(
    project: Path, kind: str
) -> None:
    with running(project, kind) as (process, name):
        before = sorted(path.name for path in project.iterdir())
        for words in (["commit"], ["commit", "--force"], ["commit", "--only", "half1"], ["rebase"]):
            done = branching(project, *words, name)
            assert done.code == 125, done
            what = "rebased" if words == ["rebase"] else "committed"
            assert f"branch '{name}' was not {what}: process {process.pid} (" in done.err
            assert "Nothing was changed\nHint: wait for its end or stop it" in done.err
        assert branching(project, "commit", "--dry-run", name).code == 0
        assert sorted(path.name for path in project.iterdir()) == before
        process.send_signal(signal.SIGKILL)  # the lock goes with its process
        process.wait(SECONDS_MAX)
        if kind in ("shell", "mcp"):
            assert branching(project, "commit", name).code == 0
            assert (project / "half1").read_text() == "1\n"
    if kind in ("fork", "tests"):
        note = re.search(r"--drop (\w+)", branching(project, "ls").err)
        assert note
        assert branching(project, "fork", "--drop", note[1]).code == 0
    assert branching(project, "ls").code == 0
    assert not list(project.glob(".branching/agents/using-*"))


def test_branches_of_branches_are_locked_each_for_itself(project: Path) -> None:
    with Workspace.open(project) as space, space.branch("outer") as outer:
        with outer.branch("inner") as inner:
            (inner.path / "made").write_text("made\n")
            with inner.in_use():
                with pytest.raises(CommitError, match="'inner' was not committed: this program"):
                    inner.commit()
                with pytest.raises(CommitError, match="'inner' was not rebased"):
                    inner.rebase()
            with outer.in_use():
                inner.commit()
        assert (outer.path / "made").read_text() == "made\n"
    assert (project / "made").read_text() == "made\n"


@pytest.mark.parametrize(("verb", "what"), [("commit", "committed"), ("rebase", "rebased")])
def test_branchfs_itself_neither_commits_nor_rebases_it(
    project: Path, verb: str, what: str
) -> None:
    """A program without the library asks the daemon by the command `branchfs`."""
    with Workspace.open(project) as space, space.branch("b", on_success=None) as branch:

        def branchfs(*options: str) -> subprocess.CompletedProcess[str]:
            words = [find_program(), verb, *options, "b", str(space.path)]
            return subprocess.run(words, capture_output=True, text=True, check=False)

        (branch.path / "made").write_text("made\n")
        with branch.in_use():
            refused = branchfs()
            assert refused.returncode == 1
            said = f'branch "b" was not {what}: process {os.getpid()} runs something in it'
            assert said in refused.stderr
            assert "Nothing was changed\nHint: wait for its end" in refused.stderr
            assert branchfs("--dry-run").returncode == 0
            assert not (project / "made").exists()
        assert branchfs().returncode == 0
        assert (project / "made").exists() == (verb == "commit")
        assert space.store is not None
        assert not (space.store / "agents").exists()
        if verb == "rebase":
            branch.abort()


def test_a_process_of_a_context_keeps_its_branch_from_being_committed(project: Path) -> None:
    """The end of the process ends that, not the end of the `with`."""
    sleeping = ["sleep", "600"]
    with (
        Workspace.open(project) as space,
        space.branch("b", on_success=None) as branch,
        BranchContext(sleeping, branch) as context,
    ):
        with pytest.raises(CommitError, match="'b' was not committed: this program"):
            branch.commit()
        context.kill()
        with pytest.raises(ProcessBranchError):
            context.wait()
        assert space.store is not None
        assert not (space.store / "agents").exists()
        branch.commit()


def test_a_lock_that_cannot_be_made_is_a_warning(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk no file can be created, but a command that frees space must run."""

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Workspace.open(project) as space, space.branch("b", on_success=None) as branch:
        monkeypatch.setattr("branching.fs.in_use.open_file", full)
        said = "other processes can commit branch 'b'"
        with pytest.warns(UserWarning, match=said), branch.in_use():
            pass
        branch.commit()


def test_a_lock_that_a_killed_process_left_is_removed(project: Path) -> None:
    with Workspace.open(project) as space, space.branch("b", on_success=None) as branch:
        script = "import os, sys, branching; branch = branching.Workspace('.').reopen('b')\n"
        script += "with branch.in_use(): os.kill(os.getpid(), 9)"
        done = subprocess.run([sys.executable, "-c", script], cwd=space.path, check=False)
        assert done.returncode == -signal.SIGKILL
        assert space.store is not None
        locks = space.store / "agents"
        assert [path.name for path in locks.glob("using-*")]
        Workspace(space.path).close()
        assert not locks.exists()
        branch.abort()


CONTENDER = """
import os, sys
from pathlib import Path
import branching
from branching.fs.in_use import held, held_alone
space = branching.Workspace(".")
branch = space.reopen("b")
alone, shared = Path(sys.argv[1], "alone"), Path(sys.argv[1], f"shared-{os.getpid()}")
for turn in range(200):
    if turn % 3:
        with branch.in_use():
            shared.touch()
            assert not alone.exists(), "committed while something runs"
            shared.unlink()
    else:
        try:
            with held_alone(space._backend, branch.inspect(), "committed"):
                alone.touch(exist_ok=False)
                assert not list(alone.parent.glob("shared-*")), "committed while something runs"
                alone.unlink()
        except branching.CommitError:
            pass
"""


@pytest.mark.filterwarnings("error")
def test_a_lock_is_taken_although_another_process_removes_its_directory(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last holder of another lock in it removes it before its owner is set."""
    removed: list[Path] = []
    fchown = os.fchown

    def fchown_removed(file: int, *ids: int) -> None:
        if not removed:
            removed.append(Path(f"/proc/self/fd/{file}").readlink())
            removed[0].rmdir()
        fchown(file, *ids)

    with Workspace.open(project) as space, space.branch("b", on_success=None) as branch:
        monkeypatch.setattr(os, "fchown", fchown_removed)
        with branch.in_use():
            assert len(removed) == 1
            assert list(removed[0].iterdir())
        monkeypatch.undo()
        branch.abort()


def test_nothing_runs_in_a_branch_while_it_is_committed(project: Path, place: Path) -> None:
    """Several processes take the lock in turns, and say so in files beside."""
    marks = place / "marks"
    marks.mkdir()
    with Workspace.open(project) as space, space.branch("b", on_success=None) as branch:
        contenders = [
            subprocess.Popen([sys.executable, "-c", CONTENDER, str(marks)], cwd=space.path)
            for _ in range(4)
        ]
        assert [each.wait(SECONDS_MAX) for each in contenders] == [0] * 4
        assert space.store is not None
        assert not (space.store / "agents").exists()
        branch.abort()


def test_a_link_in_the_place_of_the_lock_is_refused(project: Path, place: Path) -> None:
    with Workspace.open(project) as space, space.branch("b") as branch:
        assert space.store is not None
        (space.store / "agents").mkdir(exist_ok=True)
        lock = space.store / "agents" / f"using-{branch.inspect().id}"
        lock.symlink_to(place / "outside")
        with pytest.raises(BranchError) as raised, branch.in_use():
            pass
        assert raised.value.path == str(lock)
        assert not os.path.lexists(place / "outside")
        lock.unlink()
