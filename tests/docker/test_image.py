"""The image on its own: the documented line, what it says when a flag is missing, and what is in it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from testcontainers.core.wait_strategies import LogMessageWaitStrategy

from conftest import ROOT, children
from image_container import CAPABILITIES, END_SECONDS, PRIVILEGE, UNMASKED, ImageContainer, run_as_owner, run_image

if TYPE_CHECKING:
    from collections.abc import Callable

    import docker

    from project_snapshot import Project

HALF_DONE = "touch half-done; echo started; exec sleep 600"


@pytest.mark.contract("0.10", "7.2")
def test_the_documented_line_works_as_it_stands(image: str, project: Project) -> None:
    """Takes the line out of README.md and runs it in a shell, in the project."""
    readme = (ROOT / "README.md").read_text()
    line = re.search(r"^docker run (?:.*\\\n)*.*make test$", readme, re.MULTILINE)
    assert line
    told = subprocess.run(
        line.group().replace(" branching run ", f" {image} run "),
        shell=True,
        cwd=project.root,
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    assert (project.root / "made.txt").read_text() == "made\n"
    assert (project.root / "made.txt").stat().st_uid == project.owner


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("exit 0", 0),
        ("exit 7", 7),
        ("exit 125", 125),
        ("kill -KILL $$", 137),
        ("kill -TERM $$", 143),
    ],
)
def test_the_exit_code_is_the_commands(image: str, project: Project, command: str, code: int) -> None:
    assert run_image(image, "run", "--", "sh", "-c", command, project=project).returncode == code


@pytest.mark.parametrize(
    ("changed", "message", "hint"),
    [
        ({"devices": []}, "has no /dev/fuse", "--device /dev/fuse"),
        ({"cap_add": []}, "lacks the capability SYS_ADMIN", "--cap-add SYS_ADMIN"),
        ({"user": "1001"}, "/src belongs to user 1000, and the container runs as 1001", "leave --user away"),
    ],
    ids=["no device", "no capability", "another user"],
)
def test_a_missing_flag_is_named_and_nothing_runs(
    image: str, project: Project, changed: dict[str, object], message: str, hint: str
) -> None:
    before = project.tree()
    done = run_image(image, "run", "--", "touch", "ran", project=project, **changed)
    assert (done.returncode, project.tree()) == (125, before)
    assert message in done.stderr
    assert "\nHint: " in done.stderr
    assert hint in done.stderr


def test_a_missing_directory_is_named(image: str) -> None:
    done = run_image(image, "run", "--", "true")
    assert done.returncode == 125
    assert "no directory is mounted at /src" in done.stderr


@pytest.mark.parametrize(
    ("mode", "options", "message", "hint"),
    [
        (0o600, [*PRIVILEGE, *UNMASKED], "user 1000 may not open /dev/fuse", "chmod 666 /dev/fuse"),
        (0o666, PRIVILEGE, "parts of /proc are hidden from the container", "--security-opt systempaths=unconfined"),
        (0o666, UNMASKED, "may not make a user namespace", "--cap-add SYS_ADMIN"),
    ],
    ids=["a closed device", "a masked /proc", "no capability"],
)
def test_missing_requirements_are_reported_and_nothing_runs(
    image: str,
    project: Project,
    make_device: Callable[[int], str],
    mode: int,
    options: list[str],
    message: str,
    hint: str,
) -> None:
    before = project.tree()
    command = ["run", "--", "touch", "ran"]
    done = run_as_owner(image, *command, project=project, device=make_device(mode), options=options)
    assert (done.returncode, project.tree()) == (125, before), done.stderr
    assert message in done.stderr
    assert "\nHint: " in done.stderr
    assert hint in done.stderr


WHO = "id -u >who; whoami >>who; touch ~/kept && grep CapEff /proc/self/status >>who && make test"


@pytest.mark.parametrize("read_only", [[], ["--read-only", "--network", "none"]], ids=["", "read-only"])
@pytest.mark.parametrize("owner", [1000, 54321])
def test_any_user_may_run_the_container_on_an_own_directory(
    image: str,
    make_project: Callable[..., Project],
    make_device: Callable[[int], str],
    owner: int,
    read_only: list[str],
) -> None:
    """Root nowhere in the container: what mounts is the root of a user namespace."""
    project = make_project(owner=owner)
    command = ["run", "--", "sh", "-c", WHO]
    options = [*PRIVILEGE, *UNMASKED, *read_only]
    done = run_as_owner(image, *command, project=project, device=make_device(0o666), options=options)
    assert done.returncode == 0, done.stderr
    assert (project.root / "who").read_text() == f"{owner}\nbranching\nCapEff:\t0000000000000000\n"
    assert {(uid, gid) for _, uid, gid, *_ in project.tree().values()} == {(owner, owner)}


@pytest.mark.parametrize("driver", ["fuse", "overlay"])
def test_a_read_only_image_without_a_network_has_all_that_a_command_needs(
    image: str, project: Project, driver: str
) -> None:
    settings = {"read_only": True, "network_mode": "none", "cap_add": [*CAPABILITIES, "DAC_READ_SEARCH"]}
    command = ["run", "--memory-limit", "100M", "--", "sh", "-c", WHO]
    environment = {"BRANCHFS_DRIVER": driver}
    done = run_image(image, *command, project=project, environment=environment, **settings)
    assert done.returncode == 0, done.stderr
    assert (project.root / "who").read_text() == "1000\nbranching\nCapEff:\t0000000000000000\n"
    assert (project.root / "made.txt").stat().st_uid == project.owner


@pytest.mark.parametrize("command", [[], ["--help"], ["--version"]], ids=["nothing", "--help", "--version"])
def test_questions_about_the_command_need_no_flags(image: str, command: list[str]) -> None:
    assert run_image(image, *command, devices=[], cap_add=[], security_opt=[]).returncode == 0


STALE = """
import pathlib, sys
for source in pathlib.Path("/opt/branching/lib").rglob("*.py"):
    compiled = source.parent / "__pycache__" / f"{source.stem}.{sys.implementation.cache_tag}.pyc"
    if not compiled.exists() or compiled.read_bytes()[4:8] != bytes([1, 0, 0, 0]):
        print(source)
"""


def test_each_module_is_compiled_and_does_not_look_at_the_time_of_its_source(image: str) -> None:
    """Otherwise each container would compile it again, because all files have the same time."""
    done = run_image(image, "-c", STALE, entrypoint="python3")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_stopping_the_container_ends_the_command_and_drops_its_work(image: str, project: Project) -> None:
    before = project.tree()
    container = ImageContainer(image, "run", "--", "sh", "-c", HALF_DONE, project=project)
    with container.waiting_for(LogMessageWaitStrategy("started").with_startup_timeout(END_SECONDS)):
        container.get_wrapped_container().stop(timeout=END_SECONDS)
        assert container.finish().returncode == 143, "the entry point waited to be killed"
    assert project.tree() == before


def test_a_daemon_that_the_command_leaves_does_not_keep_the_store(image: str, project: Project) -> None:
    """A process in a session of its own outlives its command, with a file of the branch open."""
    program = "exec 3<kept.txt; setsid sleep 600 & echo left >left.txt"
    assert run_image(image, "run", "--", "bash", "-c", program, project=project).returncode == 0
    assert (project.root / "left.txt").read_text() == "left\n"


def test_signals_while_the_mount_closes_leave_no_store(image: str, project: Project) -> None:
    """tini passes each signal to all that the entry point runs at the end; `leaves_nothing` looks for the store."""
    with ImageContainer(image, "run", "--", "sleep", "3", project=project) as container:
        tini = container.get_wrapped_container()
        tini.reload()
        while not (found := children(tini.attrs["State"]["Pid"])) or not commands_of(found[0]):
            time.sleep(0.01)
        entry_point = found[0]  # the daemon comes to tini later
        others = "for i in $(seq 200); do sleep 600 & done"  # it looks at each process before it unmounts
        container.exec(["sh", "-c", others])
        while commands_of(entry_point):
            pass
        for _ in range(1000):
            with suppress(ProcessLookupError):
                os.killpg(entry_point, signal.SIGTERM)
            time.sleep(0.001)
        assert container.finish().returncode == 0


def commands_of(entry_point: int) -> list[int]:
    """Returns the processes of `branching` that the entry point has started."""
    found = []
    for child in children(entry_point):
        with suppress(OSError):
            if b"/branching\0" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


@pytest.mark.contract("0.7", "7.1")
def test_the_image_has_what_commands_need_and_nothing_to_build_with(image: str, project: Project) -> None:
    tools = "git bash python3 make gcc cc cargo rustc pip"
    look = f"for tool in {tools}; do command -v $tool >/dev/null && echo $tool; done; true"
    found = run_image(image, "run", "--", "sh", "-c", look, project=project).stdout.split()
    assert found == ["git", "bash", "python3", "make"]


def test_the_image_says_what_it_is(image: str, engine: docker.DockerClient) -> None:
    labels = engine.images.get(image).labels
    assert labels["org.opencontainers.image.version"] == "0.2.0"
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_git_works_in_a_branch_and_its_repository_is_committed_whole(image: str, project: Project) -> None:
    commit = "git -c user.name=n -c user.email=e commit -qm first"
    program = f'git init -q . && git add . && {commit} && test -z "$(git status -s)"'
    done = run_image(image, "run", "--", "sh", "-c", program, project=project)
    assert done.returncode == 0, done.stderr
    assert (project.root / ".git" / "HEAD").stat().st_uid == project.owner


@pytest.mark.parametrize("environment", ["-i PATH=/usr/bin", "GIT_CONFIG_COUNT=0"])
def test_git_works_in_a_repository_of_anothers_whatever_its_variables_are(
    image: str, project: Project, environment: str
) -> None:
    subprocess.run(["git", "init", "-q", project.root], check=True)
    done = run_image(image, "run", "--", "sh", "-c", f"env {environment} git status", project=project)
    assert done.returncode == 0, done.stderr


def test_a_directory_that_cannot_be_written_is_said_to_be_that(image: str, project: Project) -> None:
    done = run_image(image, "run", "true", project=project, mode="ro")
    assert done.returncode == 125
    assert "on a read-only file system" in done.stderr
    assert "\nHint: mend that, or work on another directory\n" in done.stderr


@pytest.mark.parametrize("place", ["lock", "journal/plan", "history/1/plan"])
@pytest.mark.parametrize("is_link", [False, True], ids=["", "link"])
def test_a_pipe_in_the_place_of_a_store_is_not_waited_for(
    image: str, project: Project, place: str, is_link: bool
) -> None:
    pipe = project.root / ".branching" / place
    pipe.parent.mkdir(parents=True)
    if is_link:
        os.mkfifo(project.root / "pipe")
        pipe.symlink_to("/src/pipe")
    else:
        os.mkfifo(pipe)
    done = run_image(image, "run", "true", project=project)
    assert done.returncode == 125
    assert "holds a pipe" in done.stderr
    shutil.rmtree(project.root / ".branching")


OVERLAY = {"BRANCHFS_DRIVER": "overlay"}


def test_the_overlay_driver_works_with_one_capability_more(image: str, project: Project) -> None:
    program = "grep -q ' overlay branchfs-branch .*index=on' /proc/self/mountinfo && make test"
    more = [*CAPABILITIES, "DAC_READ_SEARCH"]
    command = ["run", "--", "sh", "-c", program]
    done = run_image(image, *command, project=project, environment=OVERLAY, cap_add=more)
    assert done.returncode == 0, done.stderr
    made = project.root / "made.txt"
    assert made.read_text() == "made\n"
    assert made.stat().st_uid == project.owner


def test_without_it_the_overlay_driver_says_what_is_missing(image: str, project: Project) -> None:
    before = project.tree()
    done = run_image(image, "run", "--", "true", project=project, environment=OVERLAY)
    assert done.returncode == 125
    assert "index=on" in done.stderr
    assert "--cap-add DAC_READ_SEARCH" in done.stderr
    assert project.tree() == before
