"""Containers killed at any moment: recovery makes the directory old or new, by itself where the wrapper is there.

Until recovery has run, a commit that was killed half-way leaves old and new files. That state is tested too: `strace`
stops the daemon at the same rename of the commit each time, and then the container is killed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from branching_docker.constants import WARM_LABEL, WORKSPACE_LABEL
from conftest import WRAPPER, children, containers, found_below, kill_container

if TYPE_CHECKING:
    from collections.abc import Callable

    import docker
    from docker.models.containers import Container

    from project_snapshot import Project

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


def fill(project: Project) -> None:
    """Makes the files of generation 0."""
    (project.root / "many").mkdir()
    for path in (project.root / "many", *(project.root / "many" / str(i + 1) for i in range(FILES))):
        if path.name != "many":
            path.write_text("0\n")
        os.chown(path, project.owner, project.owner)
    (project.root / "only-0").touch()
    os.chown(project.root / "only-0", project.owner, project.owner)


def journal(project: Project) -> list[Path]:
    """Returns the transactions that are not settled."""
    with suppress(FileNotFoundError):
        return list((project.root / ".branching" / "journal").iterdir())
    return []


def wait_for(what: str, is_so: Callable[[], bool]) -> None:
    """Waits until something is so."""
    deadline = time.monotonic() + SECONDS_MAX
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def stop_in_commit(container: Container) -> subprocess.Popen[bytes]:
    """Has the daemon in the container stopped at a rename in the middle of its next commit."""
    (daemon,) = [pid for pid, words in container.top(ps_args="-eo pid,args")["Processes"] if "branchfs mount" in words]
    inject = ["-e", "trace=renameat2", "-e", "inject=renameat2:signal=STOP:when=50"]
    strace = subprocess.Popen(["strace", "-f", "-p", daemon, *inject], stderr=subprocess.DEVNULL)

    def is_attached() -> bool:
        threads = Path(f"/proc/{daemon}/task").iterdir()
        return all("TracerPid:\t0\n" not in (thread / "status").read_text() for thread in threads)

    wait_for("strace attaches", is_attached)
    return strace


HELD = f"{REWRITE}; echo up; read -r _ || :"
"""Rewrites all files, and ends when its standard input says so."""


@pytest.mark.parametrize("way", ["run", "warm", "fast path", "docker"])
def test_a_commit_that_is_killed_half_way_is_recovered(
    image: str, project: Project, engine: docker.DockerClient, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the wrapper, which reports it; where a container is run by hand, by the next command.

    The current directory contains modules of other programs, which must not be imported.
    """
    for name in ("typer", "docker", "branching_docker"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the current directory was imported')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BRANCHING_IMAGE", image)
    fill(project)
    wrapper = [str(WRAPPER), "--image", image, "-w", str(project.root)]
    name = f"branching-crash-{os.getpid()}"
    words = ["run", "--", "sh", "-ec", HELD, "sh", "1"]
    if way == "docker":
        flags = ["--device", "/dev/fuse", "--cap-add", "SYS_ADMIN", "--security-opt", "apparmor:unconfined"]
        place = ["--label", f"{WORKSPACE_LABEL}={project.root}", "-v", f"{project.root}:/src"]
        command = ["docker", "run", "--rm", "-i", "--name", name, *flags, *place, image, *words]
    elif way in ("warm", "fast path"):
        name = run(image, project, "up").stdout.strip()
        # The option --image is not for the fast path.
        command = [*(wrapper if way == "warm" else [str(WRAPPER), "-w", str(project.root)]), *words]
    else:
        command = [*wrapper, "--name", name, *words]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True) as client:
        assert client.stdout
        assert client.stdin
        assert client.stderr
        assert client.stdout.readline() == "up\n"
        container = engine.containers.get(name)
        with stop_in_commit(container):
            client.stdin.close()
            wait_for("the commit is half-way", lambda: generation(project) >= {"0", "1"})
            container.kill()
        client.wait(SECONDS_MAX)
        said = client.stderr.read()
    assert client.returncode == 137, said
    report = "which was interrupted, was finished"
    if way == "docker":
        assert generation(project) >= {"0", "1"}, "between, as long as nothing has recovered"
        doctor = run(image, project, "doctor")
        assert "warning  journal: a commit to" in doctor.stdout
        said = run(image, project, "recover").stderr
    else:
        assert "branching-docker: the container was killed during a commit" in said
    assert report in said
    assert journal(project) == []
    assert generation(project) == {"1"}
    wait_until_gone(engine, project)
    found = run(image, project, "status")
    assert found.returncode == 0
    assert report in found.stderr, "the next mount reports what was recovered before it"
    assert "journal: a commit to" not in run(image, project, "doctor").stdout
    assert run(image, project, "recover").stderr.endswith("nothing to recover.\n")


def test_a_killed_container_is_recovered_to_old_or_new(
    image: str, project: Project, engine: docker.DockerClient
) -> None:
    """At any moment. Kept branches are there after every round, and nothing in the directory is root's."""
    seed = int(os.environ.get("BRANCHING_CRASH_SEED", random.randrange(1 << 30)))
    chosen = random.Random(seed)
    print("seed", seed)
    fill(project)
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
            kill_container(engine, name)
            client.wait(SECONDS_MAX)
        wait_for("the watcher recovers", lambda: not journal(project))
        wait_until_gone(engine, project)
        after = generation(project)
        assert after in (before, {str(number)}), f"round {number}, seed {seed}"
        assert project.roots() == []
        # A container may be killed in the moment between the daemon's unmount and its own end.
        was_mounted = (project.root / ".branching" / "lock").read_text().startswith("in use\n")
        assert was_mounted or after == {str(number)}
        assert client.returncode == 137 or not was_mounted
        found = run(image, project, "ls")
        assert found.returncode == 0, found.stderr
        assert "kept" in found.stdout.split()
        assert ("the last mount ended without being unmounted" in found.stderr) == was_mounted
        told_of_crash += was_mounted
        # The killed run's own branch is nobody's any more; its siblings may be committed all the same.
        for line in found.stdout.splitlines():
            if line.startswith("run-"):
                assert run(image, project, "abort", line.split()[0]).returncode == 0
    print(f"{told_of_crash} of {ROUNDS} rounds were cut short")
    assert run(image, project, "abort", "kept").returncode == 0

    def is_trash_empty() -> bool:
        """A mount that ends while it deletes what was dropped leaves the rest to the next one."""
        assert run(image, project, "ls").returncode == 0
        trash = project.root / ".branching" / "trash"
        return not trash.exists() or not any(trash.iterdir())

    wait_for("the mounts delete what was dropped", is_trash_empty)


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
        engine.containers.get(name).kill()
        client.wait(SECONDS_MAX)
    wait_until_gone(engine, project)
    as_owner = ["setpriv", f"--reuid={project.owner}", f"--regid={project.owner}", "--clear-groups"]
    subprocess.run([*as_owner, "rm", "-rf", ".branching"], cwd=project.root, check=True)
    after = project.tree()
    assert after.pop(".")[:3] == before.pop(".")[:3]
    assert after == before
    assert run(image, project, "run", "--", "true").returncode == 0


def test_stores_are_found_in_a_tree_that_is_being_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory goes between its parent's listing and its own."""
    (tmp_path / "going" / "in").mkdir(parents=True)
    (tmp_path / "project" / ".branching").mkdir(parents=True)
    scandir = os.scandir

    def remove_first(place: str | Path | int) -> object:
        if not isinstance(place, int) and Path(place).name == "going":
            shutil.rmtree(place)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", remove_first)
    assert found_below(tmp_path) == [tmp_path / "project" / ".branching"]


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
def test_an_interrupted_up_does_not_block_the_next(image: str, project: Project, cut: str) -> None:
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
    assert found.stderr.count("which was never started: the process that should have removed it was killed.") == 2
    assert (project.root / "made").stat().st_uid == project.owner
    wait_until_gone(engine, project)
