"""Branches kept in a volume: another file system than the directory's, which outlives the containers."""

from __future__ import annotations

import subprocess
import time
import uuid
from typing import TYPE_CHECKING

import pytest

from branching_docker.store_volume import digest
from conftest import WRAPPER, containers, kill_container

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import docker

    from project_snapshot import Project

SECONDS_MAX = 300
ROUNDS = 3
FILES = 100
REWRITE = f"for i in $(seq {FILES}); do echo $1 >many/$i; done; rm -f only-*; touch only-$1"


@pytest.fixture
def volume(engine: docker.DockerClient) -> Iterator[str]:
    """The name of a volume, removed at the end with all that is in it."""
    name = f"branching-test-{uuid.uuid4().hex[:8]}"
    yield name
    for one in engine.volumes.list(filters={"name": name}):
        one.remove()


def run(image: str, project: Project, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the wrapper on a project."""
    command = [str(WRAPPER), "--image", image, "-w", str(project.root), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX, stdin=subprocess.DEVNULL)


def changed(image: str, project: Project, volume: str, *words: str) -> str:
    """Runs the wrapper with the volume, successfully, and returns what it says."""
    done = run(image, project, "--store", volume, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_branch_kept_in_a_volume_is_committed_by_a_later_container_and_undone(
    image: str, project: Project, volume: str
) -> None:
    before = project.tree()
    program = "rm -r sub; mkdir -p new/empty; ln -s ../kept.txt new/link; echo changed >kept.txt"
    changed(image, project, volume, "run", "-b", "kept", "--on-success", "keep", "--", "sh", "-c", program)
    assert project.tree() == before
    assert "kept" in changed(image, project, volume, "ls").split()
    changed(image, project, volume, "commit", "kept")
    after = project.tree()
    assert (project.root / "kept.txt").read_text() == "changed\n"
    assert {"new", "new/empty", "new/link"} == after.keys() - before.keys()
    assert "sub" not in after
    assert project.roots() == []
    changed(image, project, volume, "undo")
    undone = project.tree()
    for tree in (before, undone):  # its own time is when something last came or went in it
        tree["."] = tree["."][:3]
    assert undone == before


def test_branches_are_found_where_they_are_kept_or_the_command_fails(
    image: str, make_project: Callable[..., Project], volume: str, engine: docker.DockerClient
) -> None:
    """Never another directory's, and never an empty place as if there were none."""
    project, other = make_project(), make_project("other")
    keep = ("run", "-b", "kept", "--on-success", "keep", "--", "touch", "of-kept")
    changed(image, project, volume, *keep)
    done = run(image, project, "--store", f"{volume}-2", "run", "--", "touch", "elsewhere")
    assert done.returncode == 125
    assert f"branches of the directory are kept in /store/{volume}/" in done.stderr
    engine.volumes.get(f"{volume}-2").remove()
    assert not (project.root / "elsewhere").exists()
    assert "kept" not in changed(image, other, volume, "ls")
    changed(image, other, volume, *keep)
    changed(image, other, volume, "abort", "kept")
    done = run(image, project, "commit", "kept")
    assert done.returncode == 0, done.stderr
    assert f'are stored in the volume "{volume}"; continuing there' in done.stderr
    assert (project.root / "of-kept").exists()
    assert not (other.root / "of-kept").exists()


def test_a_killed_container_is_recovered_without_naming_its_store(
    image: str, project: Project, volume: str, engine: docker.DockerClient
) -> None:
    """The link in the directory names the store; it is removed with the last kept branch."""
    name = f"branching-store-{uuid.uuid4().hex[:8]}"
    words = ["--store", volume, "--name", name, "run", "--", "sh", "-c", "touch half; echo up; exec sleep 600"]
    command = [str(WRAPPER), "--image", image, "-w", str(project.root), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as client:
        assert client.stdout
        assert client.stdout.readline() == "up\n"
        engine.containers.get(name).kill()
        client.wait(SECONDS_MAX)
    while containers(engine, project.root):
        time.sleep(0.1)  # the test's own timeout bounds it
    assert f"--mount type=volume,src={volume}," in run(image, project, "--dry-run", "ls").stdout
    found = run(image, project, "ls")
    assert f'in the volume "{volume}"' in found.stderr
    assert "the last mount ended without being unmounted" in found.stderr
    (left,) = [line.split()[0] for line in found.stdout.splitlines() if line.startswith("run-")]
    assert run(image, project, "abort", left).returncode == 0
    done = run(image, project, "run", "-q", "--", "touch", "done")
    assert (done.returncode, done.stderr) == (0, "")
    assert not (project.root / "half").exists()
    assert project.roots() == []


def test_a_forged_link_names_no_other_volume(
    image: str, project: Project, volume: str, engine: docker.DockerClient
) -> None:
    """A project may come with one; it would mount what is another's."""
    engine.volumes.create(volume)
    place = project.root / ".branching"
    place.mkdir()
    for named in (volume, "../../etc", f"{volume}-that-is-not-there"):
        (place / "store").symlink_to(f"/store/{named}/{digest(project.root)}")
        assert "type=volume" not in run(image, project, "--dry-run", "ls").stdout
        done = run(image, project, "ls")
        assert done.returncode == 125
        assert f"branches of the directory are kept in /store/{named}/" in done.stderr
        (place / "store").unlink()
    place.rmdir()


@pytest.mark.timeout(SECONDS_MAX * 2 * ROUNDS)
def test_a_killed_container_leaves_old_or_new_where_commits_cross_file_systems(
    image: str, project: Project, volume: str, engine: docker.DockerClient
) -> None:
    (project.root / "many").mkdir()
    for number in range(FILES):
        (project.root / "many" / str(number + 1)).write_text("0\n")
    (project.root / "only-0").touch()
    subprocess.run(["chown", "-R", f"{project.owner}:{project.owner}", project.root], check=True)
    changed(image, project, volume, "run", "-b", "kept", "--on-success", "keep", "--", "touch", "of-kept")
    for number in range(1, ROUNDS + 1):
        before = generation(project)
        name = f"branching-store-{uuid.uuid4().hex[:8]}"
        words = ["--store", volume, "--name", name, "run", "--", "sh", "-ec", f"{REWRITE}; echo up", "sh", str(number)]
        command = [str(WRAPPER), "--image", image, "-w", str(project.root), *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as client:
            assert client.stdout
            assert client.stdout.readline() == "up\n"
            time.sleep(0.1 * (number - 1))  # wherever that is: any moment will do
            kill_container(engine, name)
            client.wait(SECONDS_MAX)
        while containers(engine, project.root):
            time.sleep(0.1)  # the test's own timeout bounds it
        found = changed(image, project, volume, "ls")
        assert generation(project) in (before, {str(number)})
        assert "kept" in found.split()
        assert project.roots() == []
        for line in found.splitlines():
            if line.startswith("run-"):
                changed(image, project, volume, "abort", line.split()[0])
    changed(image, project, volume, "abort", "kept")


def generation(project: Project) -> set[str]:
    """Returns which numbers the files hold: one, if each commit was whole."""
    held = {path.read_text().strip() for path in (project.root / "many").iterdir()}
    return held | {path.name.removeprefix("only-") for path in project.root.glob("only-*")}
