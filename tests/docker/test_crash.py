"""Containers killed at any moment: the directory is old or new, the next command recovers by itself and says so."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from branching_docker.names import WARM_LABEL, WORKSPACE_LABEL
from conftest import WRAPPER, containers

if TYPE_CHECKING:
    from collections.abc import Callable

    import docker

    from tree import Project

ROUNDS = int(os.environ.get("BRANCHING_CRASH_ROUNDS", "3"))
SECONDS_MAX = 180
pytestmark = pytest.mark.timeout(600 + 60 * ROUNDS)  # a round is some six containers, one after another
FILES = 400
# Every file again and again, each time with a number of its own; a mixture of two is neither old nor new.
REWRITE = f"for i in $(seq {FILES}); do echo $1 >many/$i; done; rm -f only-*; touch only-$1"


def run(image: str, project: Project, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the wrapper."""
    command = [str(WRAPPER), "--image", image, "-w", str(project.root), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX)


def generation(project: Project) -> set[str]:
    """Returns which numbers the files hold: one, if each commit was whole."""
    held = {path.read_text().strip() for path in (project.root / "many").iterdir()}
    return held | {path.name.removeprefix("only-") for path in project.root.glob("only-*")}


def test_a_killed_container_leaves_old_or_new_and_the_next_recovers(
    image: str, project: Project, engine: docker.DockerClient
) -> None:
    """Kept branches are there after every round, and nothing in the directory is root's."""
    seed = int(os.environ.get("BRANCHING_CRASH_SEED", random.randrange(1 << 30)))
    chosen = random.Random(seed)
    print("seed", seed)
    (project.root / "many").mkdir()
    for path in (project.root / "many", *(project.root / "many" / str(i + 1) for i in range(FILES))):
        if path.name != "many":
            path.write_text("0\n")
        os.chown(path, project.owner, project.owner)
    (project.root / "only-0").touch()
    os.chown(project.root / "only-0", project.owner, project.owner)
    kept = run(image, project, "run", "-b", "kept", "--on-success", "keep", "--", "touch", "of-kept")
    assert kept.returncode == 0, kept.stderr
    told_of_crash = 0
    for number in range(1, ROUNDS + 1):
        before = generation(project)
        name = f"branching-crash-{os.getpid()}-{number}"
        words = ["--name", name, "run", "--", "sh", "-ec", f"echo up; {REWRITE}", "sh", str(number)]
        command = [str(WRAPPER), "--image", image, "-w", str(project.root), *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as client:
            assert client.stdout
            assert client.stdout.readline() == "up\n"
            time.sleep(chosen.uniform(0, 0.4))
            subprocess.run(["docker", "kill", "--signal", "KILL", name], capture_output=True)
            client.wait(SECONDS_MAX)
        wait_until_gone(engine, project)
        after = generation(project)
        assert after in (before, {str(number)}), f"round {number}, seed {seed}"
        assert project.roots() == []
        found = run(image, project, "ls")
        assert found.returncode == 0, found.stderr
        assert "kept" in found.stdout.split()
        if client.returncode == 137:
            assert "the last mount ended without being unmounted" in found.stderr
            told_of_crash += 1
        # The killed run's own branch is nobody's any more; its siblings may be committed all the same.
        for line in found.stdout.splitlines():
            if line.startswith("run-"):
                assert run(image, project, "abort", line.split()[0]).returncode == 0
    print(f"{told_of_crash} of {ROUNDS} rounds were cut short")
    assert run(image, project, "abort", "kept").returncode == 0


def wait_until_gone(engine: docker.DockerClient, project: Project) -> None:
    """Waits until no container works on the project."""
    deadline = time.monotonic() + SECONDS_MAX
    while containers(engine, project.root):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_all_branches_can_be_given_up_by_the_owner_alone(
    image: str, project: Project, engine: docker.DockerClient
) -> None:
    """What a killed container left is removed with `rm -rf`, without root."""
    before = project.tree()
    name = f"branching-crash-{os.getpid()}"
    words = ["--name", name, "run", "--", "sh", "-c", "mkdir -p a/b; touch a/b/c; echo up; exec sleep 600"]
    command = [str(WRAPPER), "--image", image, "-w", str(project.root), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as client:
        assert client.stdout
        assert client.stdout.readline() == "up\n"
        subprocess.run(["docker", "kill", "--signal", "KILL", name], check=True, capture_output=True)
        client.wait(SECONDS_MAX)
    wait_until_gone(engine, project)
    as_owner = ["setpriv", f"--reuid={project.owner}", f"--regid={project.owner}", "--clear-groups"]
    subprocess.run([*as_owner, "rm", "-rf", ".branching"], cwd=project.root, check=True)
    after = project.tree()
    assert after.pop(".")[:3] == before.pop(".")[:3]
    assert after == before
    assert run(image, project, "run", "--", "true").returncode == 0


def children(process: int) -> list[int]:
    """Returns the processes that one has started."""
    with suppress(OSError):
        return [int(one) for one in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


def kill(*processes: int) -> None:
    """Kills processes that may have ended by themselves."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


CUTS: dict[str, Callable[[int], object]] = {
    "wrapper": lambda pid: kill(pid),
    "docker": lambda pid: kill(*children(pid)),
    "both": lambda pid: kill(*children(pid), pid),
    "terminal": lambda pid: os.killpg(pid, signal.SIGHUP),
}


@pytest.mark.parametrize("cut", CUTS)
def test_an_up_that_is_cut_short_keeps_nobody_from_the_next(image: str, project: Project, cut: str) -> None:
    """Whatever it had come to: nothing, a container that is never started, one that mounts, or one that is ready."""
    seed = int(os.environ.get("BRANCHING_CRASH_SEED", random.randrange(1 << 30)))
    chosen = random.Random(seed)
    print("seed", seed)
    command = [str(WRAPPER), "--image", image, "-w", str(project.root), "up"]
    for _ in range(ROUNDS):
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        ) as first:
            time.sleep(chosen.uniform(0.1, 0.5))
            with suppress(ProcessLookupError):
                CUTS[cut](first.pid)
            first.communicate(timeout=SECONDS_MAX)
        assert project.roots() == []
        try:
            for words in (("up",), ("exec", "--", "test", "-e", "kept.txt"), ("run", "--", "true")):
                done = run(image, project, *words)
                assert done.returncode == 0, done.stderr
        finally:
            assert run(image, project, "down").returncode == 0


def test_a_container_that_never_started_is_removed_by_the_next(
    image: str, project: Project, engine: docker.DockerClient
) -> None:
    """One of a warm container's client, and one of a run's: killed between the two requests that each makes."""
    for name, settings in (("warm", {WARM_LABEL: "{}"}), ("run", {})):
        labels = {WORKSPACE_LABEL: str(project.root), **settings}
        engine.containers.create(image, name=f"branching-crash-{os.getpid()}-{name}", labels=labels)
    found = run(image, project, "run", "--", "touch", "made")
    assert found.returncode == 0, found.stderr
    assert found.stderr.count("which was never started: what should have done it was killed.") == 2
    assert (project.root / "made").stat().st_uid == project.owner
    wait_until_gone(engine, project)
