"""pydantic-ai's own suite for workspaces, on a BranchFS branch.

The branch belongs to an ordinary user: root passes by permissions, and one rule is about these.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from pydantic_ai.workspaces import WorkspaceBackend, WorkspaceRef
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite
from support.branchfs import mounted

import branching
from branching import Branch, Workspace
from branching.agent.pydantic_ai.workspace import BranchWorkspace
from branching.agent.sandbox import BranchSandbox, client

OWNER = (12345, 12346)
_numbers = itertools.count()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def has_real_posix_shell() -> bool:
    return True


@pytest.fixture
def filesystem_honors_shell_permissions() -> bool:
    return True


@pytest.fixture(scope="module")
def workspace(scratch: Path) -> Iterator[Workspace]:
    place = Path(tempfile.mkdtemp(prefix="suite-", dir=scratch))
    place.chmod(0o755)
    base = place / "base"
    base.mkdir()
    os.chown(base, *OWNER)
    with mounted(base, place / "mount"), Workspace(place / "mount") as workspace:
        # While one sandbox is open the server of sandboxes stays: else each test waits for its end.
        (place / "warm").mkdir()
        warm = BranchSandbox(place / "warm")
        asyncio.run(warm.run(["true"]))
        yield workspace
        warm.close()
    shutil.rmtree(place)


class Opened:
    """Branches of one test, each with its sandbox."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._branches: dict[Path, tuple[Branch, BranchSandbox]] = {}

    def backend(self) -> BranchWorkspace:
        branch = self._workspace.branch(f"suite-{next(_numbers)}", None, None).__enter__()
        self._branches[branch.path] = (branch, BranchSandbox(branch.path))
        return BranchWorkspace(self._branches[branch.path][1])

    def attach(self, ref: WorkspaceRef) -> BranchWorkspace:
        return BranchWorkspace(self._branches[Path(ref.id)][1])

    async def destroy(self, backend: WorkspaceBackend) -> None:
        assert isinstance(backend, BranchWorkspace)
        self._branches[backend.sandbox.directory][0].abort()

    def close(self) -> None:
        for branch, sandbox in self._branches.values():
            sandbox.close()
            branch.abort()


@pytest.fixture
def opened(workspace: Workspace) -> Iterator[Opened]:
    opened = Opened(workspace)
    yield opened
    opened.close()


class TestABranch(WorkspaceBackendSuite):
    """All rules, the optional ones too."""

    @pytest.fixture
    def backend(self, opened: Opened) -> WorkspaceBackend:
        return opened.backend()

    @pytest.fixture
    def fresh_backend(self, opened: Opened) -> Callable[[], WorkspaceBackend]:
        return opened.backend

    @pytest.fixture
    def attach_backend(self, opened: Opened) -> Callable[[WorkspaceRef], WorkspaceBackend]:
        return opened.attach

    @pytest.fixture
    def destroy_environment(self, opened: Opened) -> Callable[[WorkspaceBackend], Awaitable[None]]:
        return opened.destroy


@pytest.mark.anyio
async def test_files_and_commands_see_the_workspaces_own_path_and_nothing_else(
    opened: Opened, workspace: Workspace
) -> None:
    backend = opened.backend()
    assert await backend.working_dir() == str(workspace.root)
    await backend.write_bytes(f"{workspace.root}/made.txt", b"made")
    assert (backend.sandbox.directory / "made.txt").read_text() == "made"
    assert (backend.sandbox.directory / "made.txt").stat().st_uid == OWNER[0]
    assert not (workspace.root / "made.txt").exists()
    with pytest.raises(OSError, match=r"(?i)read-only|permission denied"):
        await backend.write_bytes("/etc/made-by-a-test", b"")
    assert not Path("/etc/made-by-a-test").exists()


@pytest.mark.anyio
async def test_background_processes_die_with_the_sandbox(opened: Opened) -> None:
    backend = opened.backend()
    started = await backend.run("setsid sleep 3600 & echo started", shell=True)
    assert started.stdout == "started\n"
    running = await backend.run("pgrep -x sleep || ps -e", shell=True)
    assert running.exit_code == 0
    backend.sandbox.close()
    with pytest.raises(Exception, match="has ended"):
        await backend.run(["true"])


@pytest.mark.parametrize("how", ["raises", "is killed"])
def test_a_sandbox_that_ends_by_itself_says_why(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example where the owner of the files may not read the package."""

    def server(*pipes: object) -> Callable[[Path], object]:
        def target(_: Path) -> None:
            assert len(pipes) == 2  # they are passed on, as to the real server
            if how == "raises":
                raise ModuleNotFoundError("No module named 'branching'")
            os.kill(os.getpid(), signal.SIGKILL)

        return target

    monkeypatch.setattr(client, "_server", server)
    sandbox = BranchSandbox(tmp_path, isolation="none")
    expected = {"raises": "No module named 'branching'", "is killed": "SIGKILL"}[how]

    async def ask() -> None:
        for _ in range(2):  # who waits, and who comes later
            with pytest.raises(client.SandboxGone, match=expected):
                await sandbox.run(["true"])

    try:
        asyncio.run(ask())
    finally:
        sandbox.close()


PROGRAM = """
import asyncio, sys
from pathlib import Path
import branching
from branching import Workspace
from branching.agent.sandbox import BranchSandbox

assert branching.__file__.startswith(sys.argv[2]), branching.__file__

async def main():
    with Workspace.open(sys.argv[1]) as workspace, workspace.branch("b") as branch:
        sandbox = BranchSandbox(branch.path, seen_at=workspace.seen_at)
        try:
            done = await sandbox.run(["/bin/sh", "-c", "id -u; cat f"])
            await sandbox.call("write", b"new", path=str(sandbox.seen_at / "new"))
            print(done.stdout.decode(), (branch.path / "new").stat().st_uid)
        finally:
            sandbox.close()

asyncio.run(main())
"""


def test_the_owner_of_a_workspace_need_not_be_able_to_read_the_package(
    tmp_path: Path, as_user: tuple[int, int]
) -> None:
    """An agent that root runs, with its Python in /root, in a directory of another user."""
    private, base = tmp_path / "private", tmp_path / "base"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(branching.__file__).parent, private / "branching", ignore=ignored)
    private.chmod(0o700)
    base.mkdir()
    (base / "f").write_text("content")
    for path in (base, base / "f"):
        os.chown(path, *as_user)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(base), str(private)],
        env={**os.environ, "PYTHONPATH": str(private)},
        cwd=base,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [str(as_user[0]), "content", str(as_user[0])], done.stderr
