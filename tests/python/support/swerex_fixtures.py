"""The fixtures of SWE-ReX's own tests, with a deployment in a branch. The tests' `conftest`.

Its distribution has the tests without their `conftest`. Here the server is that of a
`BranchDeployment`, and a temporary directory is a directory in the branch, which server and tests
see at the same path.
"""

from __future__ import annotations

import asyncio
import inspect
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from swerex.runtime.abstract import (
    BashAction,
    CloseBashSessionRequest,
    Command,
    CreateBashSessionRequest,
)
from swerex.runtime.remote import RemoteRuntime

from branching import Branch, Workspace
from branching.swerex import BranchDeployment

SECONDS_MAX = 60.0


class _Action(BashAction):
    timeout: float | None = SECONDS_MAX


class _Command(Command):
    timeout: float | None = SECONDS_MAX


@dataclass(frozen=True)
class RemoteServer:
    """The port of a server, and the headers of its requests."""

    port: int
    headers: dict[str, str]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs the tests that are coroutines, as pytest-asyncio does."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def branch() -> Iterator[Branch]:
    with (
        tempfile.TemporaryDirectory(dir="/opt") as base,
        Workspace.open(base) as workspace,
        workspace.branch("attempt") as branch,
    ):
        yield branch


@pytest.fixture(scope="session")
def remote_runtime(branch: Branch) -> Iterator[RemoteRuntime]:
    home = {"HOME": str(branch.path)}  # no start-up files of the user's shell
    deployment = BranchDeployment(branch, seen_at=branch.path, env=home)
    asyncio.run(deployment.start())
    yield deployment.runtime
    asyncio.run(deployment.stop())


@pytest.fixture
def runtime_with_default_session(remote_runtime: RemoteRuntime) -> Iterator[RemoteRuntime]:
    request = CreateBashSessionRequest(startup_timeout=SECONDS_MAX)
    try:
        asyncio.run(remote_runtime.create_session(request))
        yield remote_runtime
    finally:  # a session that did not start in time exists, too
        asyncio.run(remote_runtime.close_session(CloseBashSessionRequest()))


@pytest.fixture
def remote_server(remote_runtime: RemoteRuntime) -> RemoteServer:
    address, token = remote_runtime._config.port, remote_runtime._config.auth_token
    assert address is not None
    return RemoteServer(port=address, headers={"X-API-Key": token})


@pytest.fixture
def tmp_path(branch: Branch) -> Path:
    return Path(tempfile.mkdtemp(dir=branch.path))
