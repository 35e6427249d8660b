"""Commands in the background: their output, ports and end."""

from __future__ import annotations

import socket
from pathlib import Path

import anyio.to_thread
import pytest
from support.tools import connected, served
from support.waiting import until

from branching import Workspace

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]
SERVE = """
exec python3 -u -c '
import os, socket
server = socket.create_server(("127.0.0.1", int(os.environ["BRANCHING_PORT_BASE"]) + 3))
print("listening")
while True:
    connection, _ = server.accept()
    connection.sendall(open("seed.txt", "rb").read())
    connection.close()
'
"""
"""A development server: what it answers comes from the branch."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["auto", "legacy"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_a_server_runs_between_calls_until_it_is_stopped(
    real_workspace: Workspace, mode: str
) -> None:
    async with connected(served(real_workspace, network=True), mode=mode) as agent:
        await agent.call("branch_create", name="b")
        await agent.call("branch_write", branch="b", path="seed.txt", content="of the branch\n")
        started = await agent.call("branch_start", branch="b", command=SERVE)
        assert (started["running"], started["reachable"]) == (True, True)
        number, port = started["id"], started["first_port"] + 3
        shown = await agent.call("branch_output", id=number, wait_seconds=100, until="listening")
        assert (shown["running"], shown["output"]) == (True, "listening")
        fetch = f'python3 -c \'import socket; s = socket.create_connection(("127.0.0.1", {port}))'
        ran = await agent.call("branch_run", branch="b", command=f"{fetch}; print(s.recv(99))'")
        assert "of the branch" in ran["output"]
        (listed,) = (await agent.call("branch_list"))["branches"]
        assert listed["running"] == [number]
        said = await agent.refused("branch_commit", branch="b")
        assert "something still runs in branch 'b'" in said
        assert "branch_stop" in said
        stopped = await agent.call("branch_stop", id=number)
        assert (stopped["running"], stopped["reason"]) == (False, "killed by SIGTERM")
        assert await agent.text_of(stopped["log"]) == "listening\n"
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port))
        assert (await agent.call("branch_stop", id=number)) == stopped  # again
        await agent.call("branch_commit", branch="b")
    assert (real_workspace.base / "seed.txt").read_text() == "of the branch\n"


async def test_the_output_of_a_background_command_reports_how_it_ended(
    real_workspace: Workspace,
) -> None:
    async with connected(served(real_workspace, seconds_max=2)) as agent:
        await agent.call("branch_create", name="b")
        started = await agent.call("branch_start", branch="b", command="echo done >made; exit 3")
        assert started["reachable"] is False  # without the network
        ended = await agent.call("branch_output", id=started["id"], wait_seconds=100)
        assert (ended["running"], ended["exit_code"], ended["reason"]) == (False, 3, "exit 3")
        started = await agent.call("branch_start", branch="b", command="sleep 600")
        ended = await agent.call("branch_output", id=started["id"], wait_seconds=100)
        assert "timed out" in ended["reason"]  # the longest that the server allows
        said = await agent.refused("branch_start", branch="b", command="true", timeout_seconds=3)
        assert "at most 2" in said
        for tool in ("branch_output", "branch_stop"):
            said = await agent.refused(tool, id="bg-0")
            assert started["id"] in said  # those that are known
        text = (await agent.call("branch_diff", branch="b"))["changes"]
        assert [each["path"] for each in text] == ["made"]


async def test_ports_of_two_commands_differ(real_workspace: Workspace) -> None:
    async with connected(served(real_workspace)) as agent:
        await agent.call("branch_create", name="b")
        command = "echo $BRANCHING_PORT_BASE; exec sleep 600"
        first, second = [
            await agent.call("branch_start", branch="b", command=command) for _ in range(2)
        ]
        assert abs(first["first_port"] - second["first_port"]) >= 10
        for each in (first, second):
            shown = await agent.call(
                "branch_output", id=each["id"], wait_seconds=100, until=str(each["first_port"])
            )
            assert shown["output"] == str(each["first_port"])
        await agent.call("branch_abort", branch="b")  # ends both
        for each in (first, second):
            assert not (await agent.call("branch_output", id=each["id"]))["running"]


async def test_they_end_with_the_server(real_workspace: Workspace) -> None:
    def processes() -> list[str]:
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if b"sleep\x0060123\x00" in entry.read_bytes():
                    found.append(entry.parent.name)
            except OSError:
                continue
        return found

    async with connected(served(real_workspace)) as agent:
        await agent.call("branch_create", name="b")
        await agent.call("branch_start", branch="b", command="exec sleep 60123")
        await anyio.to_thread.run_sync(lambda: until(processes, "it runs"))
    assert processes() == []
