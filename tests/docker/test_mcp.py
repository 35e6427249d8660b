"""`branching-docker -w DIR mcp`, which is what one writes in an agent's configuration, with the official client."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import mcp.client.stdio
import mcp_types
import pytest
from mcp import Client, StdioServerParameters

from conftest import SESSION, WRAPPER

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from mcp.client.session import ClientRequestContext

    from project_snapshot import Project

SECONDS_MAX = 200
pytestmark = pytest.mark.timeout(900)


def server(image: str, root: Path) -> StdioServerParameters:
    """Returns how a client starts the server; no more of our environment is passed on than it needs."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "DOCKER_HOST") if name in os.environ}
    return StdioServerParameters(
        command=str(WRAPPER),
        args=["--image", image, "-w", str(root), "mcp"],
        env={**kept, "BRANCHING_TEST_SESSION": SESSION},
    )


@asynccontextmanager
async def connected(image: str, root: Path, *, allowed: Path) -> AsyncIterator[Any]:
    """Connects a client that lets servers work in one directory; yields what calls a tool."""

    async def roots(context: ClientRequestContext) -> mcp_types.ListRootsResult | mcp_types.ErrorData:  # noqa: ARG001
        return mcp_types.ListRootsResult(roots=[mcp_types.Root(uri=allowed.as_uri())])  # type: ignore[arg-type]

    async with Client(server(image, root), list_roots_callback=roots, read_timeout_seconds=SECONDS_MAX) as client:

        async def call(tool: str, **arguments: Any) -> Any:
            answer = await client.call_tool(tool, arguments)
            if answer.is_error:
                (content,) = answer.content
                assert isinstance(content, mcp_types.TextContent)
                return content.text
            return answer.structured_content

        yield call


@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
def test_an_agent_on_the_host_works_in_branches_of_its_directory(
    image: str, project: Project, is_warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The library kills a server that needs two seconds to end: a container may, on a busy machine.
    monkeypatch.setattr(mcp.client.stdio, "PROCESS_TERMINATION_TIMEOUT", SECONDS_MAX)

    async def use() -> None:
        async with connected(image, project.root, allowed=project.root.parent) as call:
            assert (await call("branch_list"))["branches"] == []
            await call("branch_create", name="fix")
            await call("branch_write", branch="fix", path="new/file", content="new\n")
            ran = await call("branch_run", branch="fix", command="id -u; cat kept.txt new/file; touch by-command")
            assert ran["output"] == f"{project.owner}\nas it was\nnew"
            await call("branch_commit", branch="fix")
            raced = await call("branch_speculate", candidates=["sleep 600", "make test", "false"], commit=True)
            assert (raced["committed"], raced["winner"]) == (True, 1)
            await call("branch_create", name="left")
        async with connected(image, project.root, allowed=Path("/nowhere")) as call:
            assert "in none of the client's roots" in await call("branch_list")

    wrapper = [str(WRAPPER), "--image", image, "-w", str(project.root)]
    if is_warm:
        subprocess.run([*wrapper, "up"], check=True, capture_output=True, timeout=SECONDS_MAX)
    try:
        anyio.run(use)
        kept = subprocess.run([*wrapper, "ls"], check=True, capture_output=True, text=True, timeout=SECONDS_MAX)
        assert kept.stdout == ""
    finally:
        if is_warm:
            subprocess.run([*wrapper, "down"], check=True, capture_output=True, timeout=SECONDS_MAX)
    for name in ("new/file", "by-command", "made.txt"):
        found = (project.root / name).stat()
        assert (found.st_uid, found.st_gid) == (project.owner, project.owner)


CLIENT = """
import sys
sys.path[:0] = [{here!r}]
from pathlib import Path
import anyio
import test_mcp

test_mcp.SESSION = {session!r}

async def use():
    async with test_mcp.connected({image!r}, Path({root!r}), allowed=Path({root!r})) as call:
        await call("branch_create", name="b")
        await call("branch_run", branch="b", command="touch begun; exec sleep 63{mark}")

anyio.run(use)
"""


def test_no_container_is_left_when_the_client_is_killed(image: str, project: Project) -> None:
    """`leaves_nothing` looks for the container."""
    mark = os.getpid()
    here, root = str(Path(__file__).parent), str(project.root)
    script = CLIENT.format(here=here, session=SESSION, image=image, root=root, mark=mark)
    client = subprocess.Popen([sys.executable, "-c", script])
    try:
        await_process(f"sleep\x0063{mark}", client, is_there=True)
    finally:
        client.kill()
        client.wait()
    await_process(f"sleep\x0063{mark}", None, is_there=False)
    assert not (project.root / "begun").exists()


def await_process(mark: str, client: subprocess.Popen[bytes] | None, *, is_there: bool) -> None:
    """Waits until a process of this machine has the mark in its command line, or none has."""
    deadline = time.monotonic() + SECONDS_MAX
    while has_process(mark) is not is_there:
        assert client is None or client.poll() is None, "the client ended by itself"
        assert time.monotonic() < deadline, f"waited in vain for {mark!r}"
        time.sleep(0.05)


def has_process(mark: str) -> bool:
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (place / "cmdline").read_bytes():
                return True
        except OSError:
            continue  # it ended while we looked
    return False
