"""The deployment for SWE-ReX: its server, shells and commands run in a branch."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.branchfs import find_program
from support.waiting import until
from swerex.exceptions import DeploymentNotStartedError
from swerex.runtime.abstract import (
    BashAction,
    CloseBashSessionRequest,
    Command,
    CreateBashSessionRequest,
    ReadFileRequest,
    UploadRequest,
    WriteFileRequest,
)
from swerex.runtime.remote import RemoteRuntime

from branching import Branch, ProcessBranchError, Workspace
from branching.swerex import BranchDeployment

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "swe-rex.md"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
SUITE = CACHE / "branching-tools" / "swe-rex-tests-1.4.0"
RUN = ("tests/test_execution.py", "tests/test_server.py")
"""The rest tests deployments and functions inside the package."""
DIFFERENT = {
    "tests/test_server.py::test_unauthenticated_request": (
        "it wants the status 403; FastAPI now answers 401"
    ),
}
TESTS = 51
RETRIES_MAX = 4
"""SWE-ReX waits a tenth of a second for some answers of a shell: not enough on a busy machine."""
SECONDS_MAX = 250.0

# The finalizer of a deployment makes an event loop, which it never closes.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("project")
    (path / "seed.txt").write_text("seed\n")
    return path


@pytest.fixture(scope="module")
def branch(base: Path) -> Iterator[Branch]:
    with Workspace.open(base) as workspace, workspace.branch("attempt", on_success=None) as branch:
        yield branch
        if branch.is_open:
            branch.abort()


@pytest.fixture(scope="module")
def deployment(branch: Branch) -> Iterator[BranchDeployment]:
    made = BranchDeployment(branch, env={"COLOUR": "green"})
    asyncio.run(made.start())
    yield made
    asyncio.run(made.stop())


@pytest.fixture
def runtime(deployment: BranchDeployment) -> RemoteRuntime:
    return deployment.runtime


def test_a_command_sees_the_branch_at_the_path_of_the_project(
    base: Path, branch: Branch, runtime: RemoteRuntime
) -> None:
    script = "pwd; cat seed.txt; echo $COLOUR; echo new > made.txt; exit 3"
    done = asyncio.run(runtime.execute(Command(command=script, shell=True)))
    assert (done.stdout, done.exit_code) == (f"{base}\nseed\ngreen\n", 3)
    assert (branch.path / "made.txt").read_text() == "new\n"
    assert [path.name for path in base.glob("*.txt")] == ["seed.txt"]


def test_a_shell_keeps_its_state_until_it_is_closed(base: Path, runtime: RemoteRuntime) -> None:
    async def use() -> str:
        await runtime.create_session(CreateBashSessionRequest(startup_timeout=SECONDS_MAX))
        for command in ("mkdir -p inner; cd inner", "x=42"):
            await runtime.run_in_session(BashAction(command=command, check="ignore"))
        seen = await runtime.run_in_session(BashAction(command="pwd; echo $x", check="ignore"))
        await runtime.close_session(CloseBashSessionRequest())
        return seen.output

    assert asyncio.run(use()).split() == [str(base / "inner"), "42"]


def test_files_are_written_read_and_uploaded_in_the_branch(
    base: Path, branch: Branch, runtime: RemoteRuntime, tmp_path: Path
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "one.txt").write_text("one\n")

    async def use() -> str:
        await runtime.write_file(WriteFileRequest(path=str(base / "deep" / "w.txt"), content="w\n"))
        target = str(base / "notes")
        await runtime.upload(UploadRequest(source_path=str(tmp_path / "notes"), target_path=target))
        return (await runtime.read_file(ReadFileRequest(path=str(base / "deep" / "w.txt")))).content

    assert asyncio.run(use()) == "w\n"
    assert (branch.path / "notes" / "one.txt").read_text() == "one\n"
    assert not (base / "deep").exists()


def test_commands_do_not_get_the_token_and_no_request_works_without_it(
    runtime: RemoteRuntime,
) -> None:
    token = runtime._config.auth_token
    look = Command(command="env; cat /proc/*/cmdline | tr '\\0' ' '", shell=True)
    assert token
    assert token not in asyncio.run(runtime.execute(look)).stdout
    stranger = RemoteRuntime(host="http://127.0.0.1", port=runtime._config.port, auth_token="wrong")
    assert not asyncio.run(stranger.is_alive(timeout=SECONDS_MAX))


def test_a_deployment_is_alive_from_start_to_stop_and_its_changes_are_the_branchs(
    outside: Path,
) -> None:
    with Workspace.open(outside) as workspace:
        with workspace.branch("attempt") as branch:
            deployment = BranchDeployment(branch)
            with pytest.raises(DeploymentNotStartedError):
                asyncio.run(deployment.is_alive())
            asyncio.run(deployment.start())
            assert asyncio.run(deployment.is_alive(timeout=SECONDS_MAX))
            with pytest.raises(ProcessBranchError, match="stop it first"):
                asyncio.run(deployment.start())
            made = Command(command="sleep 1000 & echo new > made.txt; kill -9 $PPID", shell=True)
            with pytest.raises(Exception, match="disconnected"):
                asyncio.run(deployment.runtime.execute(made))
            assert not asyncio.run(deployment.is_alive())
            reason = "the SWE-ReX server has ended: killed by SIGKILL"
            until(lambda: reason == asyncio.run(deployment.is_alive()).message, reason)
            asyncio.run(deployment.stop())
            asyncio.run(deployment.stop())
            with pytest.raises(DeploymentNotStartedError):
                _ = deployment.runtime
        assert (outside / "made.txt").read_text() == "new\n"


def test_a_token_may_begin_with_a_dash(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("branching.swerex.secrets.token_urlsafe", lambda: "-begins-with-a-dash")

    async def use(branch: Branch) -> str:
        deployment = BranchDeployment(branch)
        await deployment.start()
        try:
            return (await deployment.runtime.execute(Command(command="echo up", shell=True))).stdout
        finally:
            await deployment.stop()

    with Workspace.open(outside) as workspace, workspace.branch("attempt") as branch:
        assert asyncio.run(use(branch)) == "up\n"


def test_a_server_that_does_not_start_is_an_error_with_its_output(
    branch: Branch, outside: Path
) -> None:
    """The interpreter has no packages."""
    python = outside / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    deployment = BranchDeployment(branch, python=str(python))
    with pytest.raises(ProcessBranchError, match="No module named 'swerex'"):
        asyncio.run(deployment.start())


def test_without_the_package_the_import_says_how_to_install_it() -> None:
    script = "import sys; sys.modules['swerex'] = None; import branching.swerex"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert 'pip install ".[swerex]" in the source tree' in done.stderr.splitlines()[-1]


def test_the_example_commits_the_attempt_that_passes(outside: Path) -> None:
    project = outside / "project"
    project.mkdir()
    (project / "version.txt").write_text("0\n")
    text = PAGE.read_text()
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [printed] = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=outside,
        env={**os.environ, "SWE_REX_LOG_STREAM_LEVEL": "CRITICAL"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, printed), done.stderr
    assert (project / "version.txt").read_text() == "2\n"


@pytest.mark.slow
def test_the_tests_of_swe_rex_pass(tmp_path: Path) -> None:
    """They are run as they are, from the source distribution that scripts/setup fetches."""
    assert SUITE.is_dir(), f"{SUITE} is missing: run scripts/setup"
    tests = tmp_path / "tests"
    shutil.copytree(SUITE, tests)
    (tests / "__init__.py").touch()
    shutil.copy(HERE / "support" / "swerex_fixtures.py", tests / "conftest.py")
    command = [sys.executable, "-m", "pytest", "-q", "--timeout=100"]
    command += [f"--deselect={name}" for name in DIFFERENT]
    for last_failed in ([], *[["--last-failed", "--last-failed-no-failures=none"]] * RETRIES_MAX):
        done = subprocess.run(
            [*command, *last_failed, *RUN],
            cwd=tmp_path,
            env={**os.environ, "BRANCHFS": find_program()},
            capture_output=True,
            text=True,
            check=False,
        )
        if not last_failed:
            collected = sum(map(int, re.findall(r"(\d+) (?:passed|failed|error)", done.stdout)))
            assert collected == TESTS, done.stdout[-5000:] + done.stderr
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
