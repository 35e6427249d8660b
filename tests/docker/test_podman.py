"""Podman in Docker's place, where this machine has it; docs/image.md says what was tried by hand beside this."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from branching_docker.constants import WORKSPACE_LABEL
from conftest import WRAPPER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from project_snapshot import Project

RUN_SECONDS = 180
LOAD_SECONDS_MAX = 900
# An image that the storages have, root's and the user's own, is not loaded: in an emulated machine that takes too long.
LOADED = os.environ.get("BRANCHING_TEST_LOADED")
NAME = LOADED or "localhost/branching-tests"
CAP_SYS_RESOURCE = 24
# A machine without the capability SYS_RESOURCE cannot give what Podman asks for by default.
SETTINGS = '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]\n'


DEVICES = ("/dev/fuse", "/dev/net/tun")
"""What everybody may open on most machines; where not, the plain user may while it is tested."""
EVERYBODY = 0o666
AS_ROOT, WITHOUT_ROOT = "as root", "without root"


def plain_user() -> pwd.struct_passwd | None:
    """Returns a user who may be several inside, which Podman needs without root; None where this machine has none."""
    subordinate = Path("/etc/subuid")
    names = [line.partition(":")[0] for line in subordinate.read_text().splitlines()] if subordinate.exists() else []
    known = {user.pw_name: user for user in pwd.getpwall() if user.pw_uid != 0}
    return next((known[name] for name in names if name in known), None)


without_root = pytest.mark.parametrize("podman", [WITHOUT_ROOT], indirect=True)
RUNTIME = "BRANCHING_TEST_RUNTIME"
"""Names another directory for what Podman keeps as long as the machine runs."""
USER = plain_user() if shutil.which("newuidmap") else None


@pytest.fixture(scope="module", params=[AS_ROOT, *([WITHOUT_ROOT] if USER else [])])
def podman(image: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """The command, with the image under test as the default. Volumes and containers are removed at the end."""
    place = Path(tempfile.mkdtemp(prefix="branching-podman-"))
    place.chmod(0o711)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as ending:
        ending.callback(shutil.rmtree, place)
        if not has_capability(CAP_SYS_RESOURCE):
            (place / "containers.conf").write_text(SETTINGS)
            patch.setenv("CONTAINERS_CONF", str(place / "containers.conf"))
        patch.setenv("BRANCHING_IMAGE", NAME)
        patch.setenv("BRANCHING_ENGINE", "podman")
        if request.param == WITHOUT_ROOT:
            give_up_root(place, patch, ending)
        if not LOADED:
            load(image, ending)
        yield "podman"


def has_capability(number: int) -> bool:
    """Whether this process has a capability."""
    (mask,) = re.findall(r"^CapEff:\s*(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> number & 1)


def load(image: str, ending: ExitStack) -> None:
    """Brings Podman the image from Docker, under a name of its own."""
    subprocess.run(["docker", "tag", image, NAME], check=True)
    ending.callback(subprocess.run, ["docker", "image", "rm", "--no-prune", NAME], check=True, timeout=RUN_SECONDS)
    with subprocess.Popen(["docker", "save", NAME], stdout=subprocess.PIPE) as saved:
        subprocess.run(["podman", "load", "--quiet"], stdin=saved.stdout, check=True, timeout=LOAD_SECONDS_MAX)
    ending.callback(subprocess.run, ["podman", "image", "rm", NAME], check=True, timeout=RUN_SECONDS)


def give_up_root(place: Path, patch: pytest.MonkeyPatch, ending: ExitStack) -> None:
    """Puts a podman on PATH that a plain user runs, who may do it for the while.

    Its storage is one of its own, unless that of the user has the image; then the user has a session of systemd's, too.
    """
    assert USER
    for name in ("storage", "run", "bin"):
        (place / name).mkdir(mode=0o700 if name == "run" else 0o755)
        os.chown(place / name, USER.pw_uid, USER.pw_gid)
    # Its process that keeps the user namespace outlives each command, and is none of a test's.
    names = f"-u BRANCHING_TEST_SESSION HOME={USER.pw_dir} USER={USER.pw_name} "
    if LOADED:
        names += f"XDG_RUNTIME_DIR=${{{RUNTIME}:-/run/user/{USER.pw_uid}}}"
    else:
        settings = (
            f'[storage]\ndriver = "overlay"\nrootless_storage_path = "{place}/storage"\nrunroot = "{place}/run"\n'
        )
        (place / "storage.conf").write_text(settings)
        names += f"XDG_RUNTIME_DIR=${{{RUNTIME}:-{place}/run}} CONTAINERS_STORAGE_CONF={place}/storage.conf"
    plainly = f"setpriv --reuid {USER.pw_uid} --regid {USER.pw_gid} --init-groups"
    program = place / "bin" / "podman"
    program.write_text(f'#!/bin/sh\ncd /\nexec {plainly} env {names} {shutil.which("podman")} "$@"\n')
    program.chmod(0o755)
    patch.setenv("PATH", f"{place}/bin:{os.environ['PATH']}")
    for device in DEVICES:
        if Path(device).stat().st_mode & EVERYBODY == EVERYBODY:
            continue
        subprocess.run(["setfacl", "--modify", f"u:{USER.pw_name}:rw", device], check=True)
        ending.callback(subprocess.run, ["setfacl", "--remove-all", device], check=True)
    ending.callback(subprocess.run, ["podman", "system", "migrate"], check=True)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory that others can reach: pytest's own are root's alone."""
    with tempfile.TemporaryDirectory(prefix="branching-podman-") as place:
        Path(place).chmod(0o711)
        yield Path(place)


@pytest.fixture
def is_rootless(podman: str) -> bool:
    """Whether it is a plain user's."""
    asked = [podman, "info", "--format", "{{.Host.Security.Rootless}}"]
    return subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout == "true\n"


@pytest.fixture
def project(make_project: Callable[..., Project], is_rootless: bool) -> Project:
    """A project of the user who runs Podman, if that is not root."""
    return make_project(owner=USER.pw_uid if is_rootless and USER else 1000)


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
def test_a_success_is_committed_and_a_failure_changes_nothing(project: Project) -> None:
    done = wrapper(project, "run", "--", "make", "test")
    assert done.returncode == 0, done.stderr
    assert (project.root / "made.txt").stat().st_uid == project.owner
    before = project.tree()
    done = wrapper(project, "--network", "none", "run", "--", "sh", "-c", "rm -rf sub; exit 7")
    assert (done.returncode, project.tree()) == (7, before), done.stderr


@pytest.fixture
def inside(project: Project, is_rootless: bool) -> int:
    """Who owns the project, as its container sees it."""
    return 0 if is_rootless else project.owner


@pytest.fixture
def warm(project: Project, podman: str) -> Iterator[str]:
    """The name of the project's warm container."""
    up = wrapper(project, "up")
    assert up.returncode == 0, up.stderr
    yield up.stdout.strip()
    wrapper(project, "down")
    assert on(project, podman) == ""


def test_a_warm_container_is_found_again_shared_and_ended(
    project: Project, podman: str, warm: str, inside: int
) -> None:
    assert wrapper(project, "up").stdout == f"{warm}\n"
    done = wrapper(project, "exec", "--", "sh", "-c", "id -u; exit 3")
    assert (done.returncode, done.stdout) == (3, f"{inside}\n"), done.stderr
    assert wrapper(project, "run", "--", "touch", "warm").returncode == 0
    assert (project.root / "warm").stat().st_uid == project.owner
    assert (
        f"{warm}  warm  running   {project.root}\n"
        in subprocess.run([WRAPPER, "ls"], capture_output=True, text=True).stdout
    )
    down = wrapper(project, "down")
    assert (down.returncode, down.stdout, on(project, podman)) == (0, f"{warm}\n", ""), down.stderr


@pytest.mark.usefixtures("nothing_left")
def test_up_and_down_again_and_again(project: Project, podman: str) -> None:
    """Each container starts under the same name immediately after the last one, and runs until `down`."""
    for number in range(3):
        up = wrapper(project, "up")
        assert up.returncode == 0, up.stderr
        done = wrapper(project, "run", "-b", f"kept-{number}", "--on-success", "keep", "--", "touch", "warm")
        assert done.returncode == 0, done.stderr
        assert len(wrapper(project, "ls").stdout.splitlines()) == number + 1
        down = wrapper(project, "down")
        assert (down.returncode, down.stdout, on(project, podman)) == (0, up.stdout, ""), down.stderr
    for number in range(3):
        assert wrapper(project, "abort", f"kept-{number}").returncode == 0


@without_root
@pytest.mark.usefixtures("nothing_left")
def test_a_warm_container_outlives_a_command_that_is_two_processes(
    podman: str, project: Project, tmp_path: Path
) -> None:
    """As without a process that keeps the user namespace: its file is in the directory that is not asked."""
    assert USER
    other = tmp_path / "run"
    other.mkdir(mode=0o700)
    os.chown(other, USER.pw_uid, USER.pw_gid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUNTIME, str(other))
        with subprocess.Popen(
            [podman, "run", "--rm", "--interactive", "--entrypoint", "cat", NAME], stdin=-1
        ) as client:
            while not children(client.pid):
                assert client.poll() is None
                time.sleep(0.05)  # the test's own timeout bounds it
            assert client.stdin
            client.stdin.close()
        up = wrapper(project, "up")
        assert up.returncode == 0, up.stderr
        time.sleep(1)  # nothing that can fail waits for this: it ended within a tenth
        try:
            assert wrapper(project, "exec", "--", "true").returncode == 0
        finally:
            down = wrapper(project, "down")
    assert (down.returncode, down.stdout) == (0, up.stdout), down.stderr


def children(process: int) -> list[str]:
    """Returns the processes that a command has started, by any of its threads."""
    return [one for path in Path(f"/proc/{process}/task").glob("*/children") for one in path.read_text().split()]


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("command", ["run", "up"])
def test_two_at_the_same_moment_share_or_are_refused(project: Project, command: str) -> None:
    words = {"run": ["run", "--", "sh", "-c", "sleep 0.5; touch $BRANCHING_BRANCH"], "up": ["up"]}[command]
    line = [str(WRAPPER), "-w", str(project.root), *words]
    both = [
        subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [one.communicate(timeout=RUN_SECONDS)[1] for one in both]
    codes = [one.returncode for one in both]
    try:
        assert 0 in codes, said
        for code, text in zip(codes, said, strict=True):
            assert code == 0 or "another container is using" in text or "in use by another" in text, text
        if command == "up":
            assert codes == [0, 0], said
            assert wrapper(project, "exec", "--", "test", "-e", "kept.txt").returncode == 0
        else:
            assert len(list(project.root.glob("run-*"))) == codes.count(0)
    finally:
        if command == "up":
            assert wrapper(project, "down").returncode == 0


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("command", ["run", "up"])
def test_a_killed_container_is_recovered_from_by_the_next(project: Project, podman: str, command: str) -> None:
    """The next command reports it; kept branches exist, and all files have the right owner."""
    kept = wrapper(project, "run", "-b", "kept", "--on-success", "keep", "--", "touch", "of-kept")
    assert kept.returncode == 0, kept.stderr
    before = project.tree()
    words = ["run", "--", "sh", "-c", "mkdir half; touch half/way; echo up; exec sleep 600"]
    if command == "up":
        up = wrapper(project, "up")
        assert up.returncode == 0, up.stderr
    line = [str(WRAPPER), "-w", str(project.root), *words]
    with subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=-3, text=True) as client:
        assert client.stdout
        assert client.stdout.readline() == "up\n"
        subprocess.run(
            [podman, "kill", "--signal", "KILL", on(project, podman).strip()], check=True, capture_output=True
        )
        assert client.wait(RUN_SECONDS) != 0
    assert project.roots() == []
    found = wrapper(project, command if command == "up" else "ls")
    assert found.returncode == 0, found.stderr
    assert "the last mount ended without being unmounted" in found.stderr
    listed = wrapper(project, "ls").stdout
    if command == "up":
        assert wrapper(project, "down").returncode == 0
    names = [line.split()[0] for line in listed.splitlines()]
    assert "kept" in names
    assert project.tree() == before
    for name in names:
        assert wrapper(project, "abort", name).returncode == 0


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


HOG = ["python3", "-c", "held = bytearray(200 << 20)"]
KINDS = ["--memory-limit=64M", "--pids-limit=40", "--cpu-limit=0.5"]


def test_limits_hold_but_without_root_under_version_1(project: Project, podman: str, is_rootless: bool) -> None:
    """Version 1 is not delegated to ordinary users."""
    asked = [podman, "info", "--format", "{{.Host.CgroupsVersion}}"]
    version = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    done = wrapper(project, "run", *KINDS, "--", "touch", "ran")
    if is_rootless and version == "v1":
        assert done.returncode == 125
        assert "cannot be enforced" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert (project.root / "ran").exists()
    for kind in KINDS:
        done = wrapper(project, "run", kind, "--json", "--", *HOG)
        ended = ("oom", 137) if kind == KINDS[0] else ("exit", 0)
        assert (json.loads(done.stdout)["ended"], done.returncode) == ended, done.stderr
