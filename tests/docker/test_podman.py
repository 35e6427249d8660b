"""Podman in Docker's place, where this machine has it; docs/image.md says what was tried by hand beside this."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from branching_docker.names import WORKSPACE_LABEL
from conftest import WRAPPER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tree import Project

RUN_SECONDS = 180
LOAD_SECONDS_MAX = 900
NAME = "localhost/branching-tests"
# A machine without the capability SYS_RESOURCE cannot give what Podman asks for by default.
SETTINGS = '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]\n'


@pytest.fixture(scope="module")
def podman(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The command, which has the image under test as the default; what it was given is removed at the end."""
    command = "podman"
    settings = tmp_path_factory.mktemp("podman") / "containers.conf"
    settings.write_text(SETTINGS)
    subprocess.run(["docker", "tag", image, NAME], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_CONF", str(settings))
        patch.setenv("BRANCHING_IMAGE", NAME)
        patch.setenv("BRANCHING_ENGINE", command)
        with subprocess.Popen(["docker", "save", NAME], stdout=subprocess.PIPE) as saved:
            subprocess.run([command, "load", "--quiet"], stdin=saved.stdout, check=True, timeout=LOAD_SECONDS_MAX)
        yield command
        subprocess.run([command, "image", "rm", NAME], check=True, timeout=RUN_SECONDS)
    subprocess.run(["docker", "image", "rm", "--no-prune", NAME], check=True, timeout=RUN_SECONDS)


@pytest.fixture
def nothing_left(podman: str, project: Project) -> Iterator[None]:
    """Fails the test that leaves a container on its project."""
    yield
    assert on(project, podman) == ""


def on(project: Project, podman: str) -> str:
    """Returns the containers on a project."""
    listed = [podman, "ps", "--all", "--quiet", "--filter", f"label={WORKSPACE_LABEL}={project.root}"]
    return subprocess.run(listed, stdout=subprocess.PIPE, text=True, check=True, timeout=RUN_SECONDS).stdout


def wrapper(project: Project, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the wrapper on a project."""
    command: list[str | Path] = [WRAPPER, "-w", project.root, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS, stdin=subprocess.DEVNULL)


@pytest.mark.usefixtures("nothing_left")
def test_what_succeeds_is_committed_and_what_fails_changes_nothing(project: Project) -> None:
    done = wrapper(project, "run", "--", "make", "test")
    assert done.returncode == 0, done.stderr
    assert (project.root / "made.txt").stat().st_uid == project.owner
    before = project.tree()
    done = wrapper(project, "--network", "none", "run", "--", "sh", "-c", "rm -rf sub; exit 7")
    assert (done.returncode, project.tree()) == (7, before), done.stderr


@pytest.mark.usefixtures("nothing_left")
def test_a_warm_container_is_found_again_shared_and_ended(project: Project) -> None:
    up = wrapper(project, "up")
    assert up.returncode == 0, up.stderr
    try:
        assert wrapper(project, "up").stdout == up.stdout
        done = wrapper(project, "exec", "--", "sh", "-c", "id -u; exit 3")
        assert (done.returncode, done.stdout) == (3, f"{project.owner}\n"), done.stderr
        assert wrapper(project, "run", "--", "touch", "warm").returncode == 0
        assert (project.root / "warm").stat().st_uid == project.owner
    finally:
        down = wrapper(project, "down")
    assert (down.returncode, down.stdout) == (0, up.stdout), down.stderr


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL], ids=lambda sent: sent.name)
def test_the_container_ends_with_its_client(project: Project, podman: str, sent: signal.Signals) -> None:
    """Killed outright, the client cannot pass it on: the watcher does."""
    before = project.tree()
    command = [str(WRAPPER), "-w", str(project.root), "run", "--", "sh", "-c", "touch half; echo up; exec sleep 600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as client:
        assert client.stdout
        assert client.stdout.readline() == "up\n"
        client.send_signal(sent)
        assert client.wait(RUN_SECONDS) == (130 if sent == signal.SIGINT else -sent)
        while on(project, podman):
            time.sleep(0.2)  # the test's own timeout bounds it
    assert project.tree() == before


def test_the_doctor_finds_it_well(podman: str, project: Project) -> None:
    told = wrapper(project, "doctor")
    assert told.returncode == 0, told.stdout
    assert f"ok       engine: Podman at {shutil.which(podman)}" in told.stdout
    assert "inside: mount: a directory was mounted, branched, committed and undone" in told.stdout
