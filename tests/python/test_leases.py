"""Branches of killed programs: the next program that opens the workspace drops the branches that a
`with` block or a pattern would have ended, and keeps the others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.branchfs import find_program
from support.command import branching

from branching import Workspace
from branching.fs.branchfs import read_control_path
from branching.fs.control_client import ControlSocket, Fields, RequestRefused

SECONDS_MAX = 60
PROLOGUE = """
import os, signal, sys, time
from branching import BestOfN, Speculate, Workspace
space = Workspace.open(".")
def ready():
    print("ready", flush=True)
    time.sleep(600)
"""
PROGRAMS = {
    "with": """
with space.branch("b") as branch:
    ready()
""",
    "pattern": """
Speculate([lambda path: time.sleep(600), lambda path: ready()])(space)
""",
    "pattern in processes": """
Speculate([lambda path: time.sleep(600)], isolate_processes=True, on_event=lambda _: ready())(space)
""",
    "pattern in a branch, after another one": """
with space.branch("first"):
    pass
with space.branch("b") as branch:
    BestOfN([lambda path: ready()])(branch)
""",
}


@pytest.fixture
def project(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BRANCHFS", find_program())
    path = place / "project"
    path.mkdir()
    return path


def started(project: Path, code: str) -> subprocess.Popen[str]:
    """Starts a program and waits until it is ready."""
    argv = [sys.executable, "-c", PROLOGUE + code]
    process = subprocess.Popen(argv, cwd=project, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def killed(project: Path, code: str, number: signal.Signals = signal.SIGKILL) -> None:
    process = started(project, code)
    process.send_signal(number)
    assert process.wait(SECONDS_MAX) == -number
    process.communicate()


def names(project: Path) -> tuple[list[str], str]:
    """Returns what `branching ls` lists, and what it says beside."""
    done = branching(project, "ls")
    assert done.code == 0, done
    return [line.split()[0] for line in done.out.splitlines()], done.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize("program", PROGRAMS)
def test_branches_of_a_killed_program_are_dropped_and_reported_once(
    project: Path, program: str, number: signal.Signals
) -> None:
    killed(project, PROGRAMS[program], number)
    assert (project / ".branching").exists()
    found, said = names(project)
    assert found == []
    assert said.startswith("dropped the branches of a program that was killed: ")
    assert names(project) == ([], "")
    assert not (project / ".branching").exists()


KILLED_BEFORE_THE_REPLY = """
from branching.fs import branchfs
def die(_):
    os.kill(os.getpid(), signal.SIGKILL)
with space.branch("first", on_success=None):
    pass
with space.branch("outer") as outer:
    branchfs._record = die
    with outer.branch("inner"):
        pass
"""
LOADER_KILLED_BEFORE_THE_REPLY = """
import tempfile
from branching.fs import branchfs
def die(_):
    os.kill(os.getpid(), signal.SIGKILL)
with space.branch("first", on_success=None) as first, tempfile.TemporaryFile() as file:
    first.export(file)
    file.seek(0)
    with space.branch("outer") as outer:
        branchfs._record = die
        outer.load("inner", file, leased=True)
"""


@pytest.mark.parametrize(
    "program",
    [KILLED_BEFORE_THE_REPLY, LOADER_KILLED_BEFORE_THE_REPLY],
    ids=["created", "loaded"],
)
def test_a_branch_whose_creator_is_killed_before_it_hears_of_it_is_dropped(
    project: Path, program: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROLOGUE + program],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    found, said = names(project)
    assert found == ["first"]
    assert "outer" in said
    assert "inner" in said


def test_the_daemon_writes_a_lease_to_a_regular_file_only(project: Path, place: Path) -> None:
    with Workspace.open(project) as space:
        control = ControlSocket(read_control_path(space.root))

        def create(name: str, descriptor: int | None) -> object:
            fields: Fields = {"name": name, "lease": True}
            sent = [] if descriptor is None else [descriptor]
            return control.request("create", fields, descriptors=sent)["id"]

        reader, writer = os.pipe()
        for descriptor in (None, reader, writer):
            with pytest.raises(RequestRefused) as refused:
                create("b", descriptor)
            assert refused.value.kind == "usage"
        os.close(reader)
        os.close(writer)
        with (place / "leases").open("wb") as file:
            one = create("b", file.fileno())
            with pytest.raises(RequestRefused) as refused:
                create("two\nlines", file.fileno())
            assert refused.value.kind == "name"
        assert (place / "leases").read_text() == f"+{one} b\n"
        assert [each.name for each in space.branches()] == ["b"]
        control.close()


def test_a_program_that_opens_the_workspace_drops_it_too(project: Path) -> None:
    killed(project, PROGRAMS["with"])
    with Workspace.open(project) as space:
        assert space.dropped == ["b"]
        assert space.branches() == []


@pytest.mark.parametrize(
    "code",
    [
        'space.branch("kept", on_success=None).__enter__(); ready()',
        'space.branch("kept", on_error=None).__enter__(); ready()',
        """
with space.branch("kept", on_success=None): pass
ready()
""",
        """
Speculate([lambda path: True], commit=False)(space)
ready()
""",
        """
Speculate([lambda path: False], keep_failed=True)(space)
ready()
""",
    ],
    ids=["on_success=None", "on_error=None", "after its block", "a winner", "failures"],
)
def test_branches_that_were_to_be_kept_survive_a_killed_program(project: Path, code: str) -> None:
    killed(project, code)
    found, said = names(project)
    assert len(found) == 1
    assert "dropped" not in said
    assert branching(project, "abort", *found).code == 0


def test_a_branch_that_is_open_when_a_program_ends_by_itself_stays(project: Path) -> None:
    code = PROLOGUE + 'space.branch("open").__enter__()'
    subprocess.run([sys.executable, "-c", code], cwd=project, check=True, timeout=SECONDS_MAX)
    assert names(project) == (["open"], "")
    assert branching(project, "abort", "open").code == 0


def test_branches_of_a_program_that_lives_stay(project: Path) -> None:
    living = started(project, PROGRAMS["with"].replace('"b"', '"living"'))
    killed(project, PROGRAMS["with"])
    found, said = names(project)
    assert found == ["living"]
    assert said == "dropped the branches of a program that was killed: b\n"
    living.kill()
    living.communicate()
    assert names(project)[0] == []


def test_a_branch_below_which_others_work_stays_until_they_have_ended(project: Path) -> None:
    killed(
        project,
        PROGRAMS["with"].replace("ready()", 'branch.branch("c", None).__enter__(); ready()'),
    )
    assert names(project) == (["b", "c"], "")
    assert branching(project, "abort", "c").code == 0
    assert names(project)[0] == []


def test_a_forked_process_that_ends_leaves_its_parents_lease(project: Path) -> None:
    fork = """
with space.branch("b") as branch:
    if os.fork() == 0:
        sys.exit()
    os.wait()
    ready()
"""
    killed(project, fork)
    assert names(project) == ([], "dropped the branches of a program that was killed: b\n")


def test_a_forked_process_that_lives_does_not_keep_its_parents_branch(project: Path) -> None:
    fork = """
with space.branch("b") as branch:
    child = os.fork()
    if child == 0:
        os.close(1)
        time.sleep(600)
    print("ready", child, flush=True)
    time.sleep(600)
"""
    argv = [sys.executable, "-c", PROLOGUE + fork]
    with subprocess.Popen(argv, cwd=project, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline().split()[1])
        process.kill()
    try:
        assert names(project) == ([], "dropped the branches of a program that was killed: b\n")
    finally:
        os.kill(child, signal.SIGKILL)
    assert names(project) == ([], "")  # the last to leave unmounts
