"""Real containers: the image built once, projects of every kind to work on, and proof that each test left nothing.

Containers that a test starts itself come from testcontainers and carry its session's label; those of the wrapper carry
the project's path. Its reaper is off: its image would have to be pulled, and `leaves_nothing` is stricter.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import docker
import pytest
from docker.errors import APIError, DockerException
from testcontainers.core.config import testcontainers_config
from testcontainers.core.labels import LABEL_SESSION_ID, SESSION_ID

from branching_docker.constants import WORKSPACE_LABEL
from project_snapshot import Project

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

testcontainers_config.ryuk_disabled = True
# What a process of this session's is known by, whatever becomes of its parent.
SESSION = str(uuid.uuid4())
os.environ["BRANCHING_TEST_SESSION"] = SESSION
# Under nohup, and in the background of a script, they are ignored, by our children too, and tests send them.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# As with Pythons: what is installed is tested.
collect_ignore = [] if shutil.which("podman") else ["test_podman.py"]
ROOT = Path(__file__).resolve().parents[2]
WRAPPER = Path(sys.executable).parent / "branching-docker"
LEFTOVER_WAIT_SECONDS = 120
BUILD_SECONDS_MAX = 1500


@pytest.fixture(scope="session")
def engine() -> Iterator[docker.DockerClient]:
    """The Docker engine. Where it is missing these tests fail: they are the ones that prove the image."""
    try:
        client = docker.from_env()
    except DockerException as error:
        pytest.fail(f"the container tests need Docker, which does not answer: {error}. Hint: start it", pytrace=False)
    yield client
    client.close()


@pytest.fixture(scope="session")
def image(engine: docker.DockerClient) -> str:
    """The image, built from this tree by the wrapper's own command. BRANCHING_TEST_BUILT names one that is there."""
    if built_before := os.environ.get("BRANCHING_TEST_BUILT"):
        return built_before
    name = os.environ.get("BRANCHING_TEST_IMAGE", "branching")
    with (ROOT / "Dockerfile").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run waits, and takes the layers from the cache
        built = subprocess.run(
            [WRAPPER, "--image", name, "build", ROOT],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BUILD_SECONDS_MAX,
        )
    if built.returncode:
        pytest.fail(f"the image was not built:\n{built.stdout[-4000:]}", pytrace=False)
    engine.images.get(name)
    return name


@pytest.fixture
def make_project(tmp_path: Path) -> Callable[..., Project]:
    """Makes a small project, of any name and owner."""

    def make(name: str = "project", *, owner: int = 1000) -> Project:
        root = tmp_path / name
        root.mkdir()
        (root / "Makefile").write_text("test:\n\t@echo made > made.txt\n")
        (root / "kept.txt").write_text("as it was\n")
        (root / "sub").mkdir()
        (root / "sub" / "bytes.bin").write_bytes(bytes(range(256)) * 64)
        (root / "sub" / "read-only.txt").write_text("do not touch\n")
        (root / "sub" / "read-only.txt").chmod(0o444)
        (root / "script.sh").write_text("#!/bin/sh\nexit 0\n")
        (root / "script.sh").chmod(0o755)
        (root / "link").symlink_to("sub/bytes.bin")
        (root / "dangling").symlink_to("/nowhere/at/all")
        os.link(root / "kept.txt", root / "sub" / "hard.txt")
        for path in (root, *root.rglob("*")):
            os.lchown(path, owner, owner)
        return Project(root, owner)

    return make


@pytest.fixture
def project(make_project: Callable[..., Project]) -> Project:
    """A small project of user 1000."""
    return make_project()


@pytest.fixture
def make_device(tmp_path: Path) -> Callable[[int], str]:
    """Makes the device of the documented flag, with a mode that this machine's own may not have."""

    def make(mode: int) -> str:
        node = tmp_path / "fuse"
        os.mknod(node, stat.S_IFCHR, os.makedev(10, 229))
        node.chmod(mode)
        return f"{node}:/dev/fuse"

    return make


@pytest.fixture(autouse=True)
def leaves_nothing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """Fails the test that leaves a container, a process, a mount or a store behind."""
    yield
    client = request.getfixturevalue("engine") if "image" in request.fixturenames else None
    deadline = time.monotonic() + LEFTOVER_WAIT_SECONDS
    while left := [
        *(containers(client, tmp_path) if client else ()),
        *processes(),
        *stores(tmp_path),
        *mounts(tmp_path),
    ]:
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {left}", pytrace=False)
        time.sleep(0.05)


def children(process: int) -> list[int]:
    """Returns the processes that one has started."""
    with suppress(OSError):
        return [int(one) for one in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


def containers(client: docker.DockerClient, below: Path) -> list[str]:
    """Returns the containers that work on something below a directory."""
    of_wrapper = [
        str(one["Names"])
        for one in labelled(client, WORKSPACE_LABEL)
        if Path(one["Labels"][WORKSPACE_LABEL]).is_relative_to(below)
    ]
    return [*of_wrapper, *(str(one["Names"]) for one in labelled(client, f"{LABEL_SESSION_ID}={SESSION_ID}"))]


def labelled(client: docker.DockerClient, label: str) -> list[dict[str, Any]]:
    """Returns the containers with a label, by one question: those of others may go before a second."""
    found: list[dict[str, Any]] = client.api.containers(all=True, filters={"label": label})
    return found


def kill_container(client: docker.DockerClient, name: str) -> None:
    """Kills a container that may have ended by itself."""
    with suppress(APIError):
        client.containers.get(name).kill()


def processes() -> list[str]:
    """Returns the processes on this machine that a test of this session started."""
    left = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            ours = place.name != str(os.getpid()) and SESSION.encode() in (place / "environ").read_bytes()
            if ours and (words := (place / "cmdline").read_bytes().replace(b"\0", b" ")):
                left.append(f"{place.name} {words.decode()}")
        except OSError:
            continue  # it ended while we looked
    return left


def stores(below: Path) -> list[str]:
    """Returns what BranchFS left in the projects: all but commits that can be undone, and logs of races."""
    kept = ("layers", "journal", "trash")
    left = []
    for store in found_below(below):
        # It goes while we look, which is all that is asked; or it is the mark that hides the store in a layer.
        with suppress(FileNotFoundError, NotADirectoryError):
            is_kept = any((store / "history").iterdir()) or (store / "logs" / "kept").exists()
            left += [] if is_kept else [str(store)]
            left += [str(path) for name in kept for path in (store / name).iterdir()]
            left += [f"{store}: branch {name}" for name in branches(store)]
    return left


def found_below(place: Path) -> list[Path]:
    """Returns the stores in a tree that may be going while we look, as `rglob` cannot."""
    return [Path(at, name) for at, names, _ in os.walk(place) for name in names if name == ".branching"]


def branches(store: Path) -> list[str]:
    """Returns the names of the open branches, from the branch log in the store."""
    names: dict[int, str] = {}
    log = store / "branches" / "log"
    for line in log.read_text().splitlines() if log.exists() else ():
        told = json.loads(line)
        if "id" in told:
            names[told["id"]] = told["name"]
        names.pop(told.get("gone"), None)
    return [*names.values()]


def mounts(below: Path) -> list[str]:
    """Returns the host's mounts below a directory."""
    return [
        line
        for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
        if f" {below}" in line
    ]
