"""Fixtures: a workspace on each backend, and the check that a test left nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.branchfs import mounted
from support.command import Running
from support.fake import FakeBranchFS, mount_table_line, serving
from support.sandboxed_branch import OWNER, SandboxedBranch, WorkspacePair, mounted_pair
from support.traces import Traces, processes_in

from branching import BranchingError, Workspace
from branching._linux import mountinfo
from branching.process.sandbox import parent_state

NAME_FROM = "seed.txt"


BACKENDS = os.environ.get("BRANCHING_TEST_BACKENDS", "fake,branchfs").split(",")
NOT_ON_DAXFS = {
    "test_results_say_how_much_was_changed": "its list of changes is empty",
    "test_failures_say_how_much_they_had_changed": "its list of changes is empty",
    "test_a_pattern_inside_a_candidate_is_stopped_with_it": "waits for a nested branch",
    "test_a_pattern_inside_a_candidate_commits_into_its_branch": "nested branches, in threads",
    "test_a_pattern_can_be_called_again_and_at_the_same_time": "nested branches, in threads",
}
"""Tests of the contract suite that DaxFS cannot pass, besides those in which it refuses a call."""
_REFUSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Reports a test in which DaxFS refuses something by name as an expected failure."""
    report = yield
    error = call.excinfo.value if call.excinfo else None
    is_refused = isinstance(error, BranchingError) and "DaxFS has no" in error.message
    # Such a test leaves its branches open.
    if report.failed and (is_refused or (call.when == "teardown" and _REFUSED in item.stash)):
        item.stash[_REFUSED] = True
        report.outcome = "skipped"
        report.wasxfail = f"refused: {error.message if isinstance(error, BranchingError) else ''}"
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips slow tests in scripts/test --fast, and selects those of DaxFS where it is tested."""
    if BACKENDS == ["daxfs"]:
        kept = [item for item in items if "daxfs" in getattr(item, "fixturenames", ())]
        kept += [item for item in items if item.name.endswith("[daxfs]") or "[daxfs-" in item.name]
        left_out = [item for item in items if item not in kept]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in kept]
        for item in items:
            reason = NOT_ON_DAXFS.get(getattr(item, "originalname", ""))
            if reason is not None:
                item.add_marker(pytest.mark.xfail(reason=reason, run="nested" not in reason))
    if os.environ.get("BRANCHING_TEST_FAST"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: left out by scripts/test --fast"))


@pytest.fixture(scope="session", autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A temporary directory of this run: files of other runs are not counted as left behind."""
    tmp_path_factory.getbasetemp()  # pytest's own, made before ours is the place for it
    # Under nohup, and in the background of a script, they are ignored, by our children too, and
    # tests send them.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    path = Path(tempfile.mkdtemp(prefix="bt-"))
    path.chmod(0o755)  # an ordinary user must get to the mounts in it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(path))
        patch.setattr(tempfile, "tempdir", str(path))
        yield path
    path.rmdir()


@pytest.fixture(autouse=True)
def _leaves_nothing(scratch: Path) -> Iterator[None]:
    """Fails a test that left a mount, a child process or a temporary directory."""
    before = Traces.now(scratch)
    yield
    assert not (left := before.left_since()), f"left behind:\n{left}"


@pytest.fixture
def place(scratch: Path, _leaves_nothing: None) -> Iterator[Path]:
    """A directory for a test's mount. Not pytest's own: its path is too long for a socket, and
    only root may enter it."""
    path = Path(tempfile.mkdtemp(prefix="té st ", dir=scratch))
    path.chmod(0o755)
    yield path
    left = Running.end_all()
    _remove(path)
    assert not left, f"still running: {left}"


def _remove(path: Path) -> None:
    """Removes a tree in which losing candidates that are threads may still release a lock file."""
    while path.exists():
        with suppress(FileNotFoundError):
            shutil.rmtree(path)


@pytest.fixture
def outside() -> Iterator[Path]:
    """A directory that no sandbox covers by itself, as it does /tmp: where most projects lie."""
    path = Path(tempfile.mkdtemp(prefix="branching-test-", dir="/opt"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module", params=["root", "user", "namespace"])
def pair(request: pytest.FixtureRequest) -> Iterator[WorkspacePair]:
    """Two workspaces of root, of a user, and of root in a user namespace."""
    with mounted_pair(OWNER if request.param == "user" else None) as pair:
        pair.is_namespaced = request.param == "namespace"
        yield pair


@pytest.fixture
def sandboxed(pair: WorkspacePair, monkeypatch: pytest.MonkeyPatch) -> Iterator[SandboxedBranch]:
    """A branch in a sandbox, for attempts to escape."""
    if pair.is_namespaced:  # what somebody who is not root gets
        monkeypatch.setattr(parent_state, "_may_make_namespaces", lambda _: False)
    made = SandboxedBranch(pair)
    yield made
    made.close()


@dataclass
class Mounted:
    """A mounted directory with one file in it."""

    base: Path
    root: Path
    backend: str
    fake: FakeBranchFS | None = None


@pytest.fixture
def real(place: Path) -> Iterator[Mounted]:
    """A real BranchFS mount."""
    yield from _really_mounted(place, "fuse")


@pytest.fixture
def overlaid(place: Path) -> Iterator[Mounted]:
    """A real BranchFS mount whose branches are kernel overlayfs mounts."""
    yield from _really_mounted(place, "overlay")


def _really_mounted(place: Path, driver: str) -> Iterator[Mounted]:
    base, root = place / "base", place / "mount"
    base.mkdir()
    (base / NAME_FROM).write_text("seed\n")
    with mounted(base, root, driver=driver):
        yield Mounted(base, root, "overlay" if driver == "overlay" else "branchfs")
        assert not (running := Running.end_all()), f"still running: {running}"
        assert not (left := processes_in(root)), f"processes left in branches: {left}"


@pytest.fixture
def faked(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mounted]:
    """The stand-in, made visible by a line added to the mount table."""
    root = place / "mount"
    root.mkdir()
    (root / NAME_FROM).write_text("seed\n")
    table = place / "mountinfo"
    table.write_bytes(Path("/proc/self/mountinfo").read_bytes() + mount_table_line(root))
    monkeypatch.setattr(mountinfo, "MOUNT_TABLE", table)
    fake = FakeBranchFS(root)
    with serving(fake, place / "control"):
        yield Mounted(root, root, "fake", fake)


@pytest.fixture
def daxfs(place: Path) -> Iterator[Mounted]:
    """A DaxFS mount, in the virtual machine of tests/vm/daxfs."""
    source, root = place / "source", place / "mount"
    source.mkdir()
    root.mkdir()
    (source / NAME_FROM).write_text("seed\n")
    heap = "/dev/dma_heap/system"
    made = ["mkdaxfs", "-b", "-D", "256M", "-d", str(source), "-H", heap, "-m", str(root)]
    subprocess.run(made, check=True)
    yield Mounted(root, root, "daxfs")
    for mount in mountinfo.read_mounts()[::-1]:  # a test that was refused leaves branches open
        if mount.fstype == "daxfs" and mount.source == str(root):
            subprocess.run(["umount", "-l", mount.point], check=True)
    subprocess.run(["umount", str(root)], check=True)


@pytest.fixture(params=BACKENDS)
def mount(request: pytest.FixtureRequest) -> Mounted:
    """A mount of each backend in turn: what holds for one must hold for all."""
    fixture = {"fake": "faked", "branchfs": "real", "daxfs": "daxfs"}[request.param]
    found: Mounted = request.getfixturevalue(fixture)
    return found


@pytest.fixture
def workspace(mount: Mounted) -> Iterator[Workspace]:
    """A workspace on each backend in turn. A branch still open at the end fails the test."""
    yield from _opened(mount)


@pytest.fixture
def real_workspace(real: Mounted) -> Iterator[Workspace]:
    """A workspace on a real mount, for what is about processes and time."""
    yield from _opened(real)


def _opened(mount: Mounted) -> Iterator[Workspace]:
    space = Workspace(mount.root)
    yield space
    left = [record.name for record in space.branches()]
    space.close()
    assert not left, f"branches left open: {left}"


@pytest.fixture
def as_user() -> tuple[int, int]:
    """Uid and gid of an ordinary user, for a test that runs as root."""
    assert os.geteuid() == 0, "this test changes users and must run as root"
    return 12345, 12346
