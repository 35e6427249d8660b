"""`branching mcp` as a client starts it, over pipes and over HTTP, and how it ends with it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from support.command import branching, branching_argv
from support.tools import SECONDS_MAX, connected, over_stdio
from support.waiting import until

from branching._linux.mountinfo import read_mounts
from branching.mcp.worker_threads import run_long, run_short

TOKEN = "correct horse battery"
pytestmark = pytest.mark.timeout(600)  # each starts processes that load a lot


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def project(place: Path) -> Path:
    """A directory that is not mounted."""
    root = place / "project"
    root.mkdir()
    (root / "seed.txt").write_text("seed\n")
    return root


def mounts() -> list[Path]:
    """The mounts of this test's temporary directory, but for those inside of sandboxes."""
    here = Path(tempfile.gettempdir())
    return [mount.directory for mount in read_mounts() if mount.directory.is_relative_to(here)]


def processes_with(mark: str) -> list[int]:
    """The processes, of whatever parent, whose command line has the mark."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "cmdline").read_bytes() and entry.name != str(os.getpid()):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_whole_session_over_pipes(
    project: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = over_stdio(project, "--hide", "*.key", monkeypatch=monkeypatch)
    async with connected(server, mode=mode, roots=[project]) as agent:
        await agent.call("branch_create", name="left")
        ran = await agent.call("branch_run", branch="left", command="pwd; echo stray >&1; cat")
        assert ran["output"].splitlines() == [str(project), "stray"]  # its input is empty
        raced = await agent.call(
            "branch_speculate", candidates=["exec sleep 600", "echo x >made; exit 0"], commit=True
        )
        assert (raced["committed"], raced["winner"]) == (True, 1)
        await agent.hears("[")
    assert (project / "made").read_text() == "x\n"
    assert mounts() == []
    until(lambda: not processes_with(str(project)), "the end of the daemon")
    assert ls(project) == []


def ls(project: Path) -> list[dict[str, Any]]:
    done = branching(project, "ls", "--json")
    assert done.code == 0, done.err
    branches: list[dict[str, Any]] = done.document["branches"]
    return branches


CLIENT = """
import json, subprocess, sys

server = subprocess.Popen({argv!r}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
for message in {messages!r}:
    server.stdin.write(json.dumps(message) + "\\n")
    server.stdin.flush()
    while "id" in message and json.loads(server.stdout.readline()).get("id") != message["id"]:
        pass
"""
"""Any program: what the protocol's library does at its end is no part of this."""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_client_is_killed(project: Path, number: int) -> None:
    mark = str(os.getpid())
    run = {"branch": "b", "command": f"touch began; exec sleep 61{mark}"}
    messages = [*introduction(), tool(3, "branch_create", name="b"), tool(4, "branch_run", **run)]
    script = CLIENT.format(argv=branching_argv("mcp", "-w", str(project)), messages=messages)
    client = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    try:
        until(
            lambda: processes_with(f"sleep\x0061{mark}") or client.poll() is not None,
            "the command that runs",
        )
        assert client.poll() is None, "the client ended by itself"
        assert mounts()
    finally:
        client.send_signal(number)
        client.wait()
    until(lambda: not processes_with(f"sleep\x0061{mark}"), "the end of the command")
    until(lambda: not processes_with(str(project)), "the end of the server")
    until(lambda: mounts() == [], "the end of the mount")
    assert ls(project) == []
    assert not (project / "began").exists()


@contextmanager
def served(project: Path, *words: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    server = subprocess.Popen(
        branching_argv("mcp", *words),
        cwd=project,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        yield server
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
        try:
            server.communicate(timeout=SECONDS_MAX)
        finally:
            server.kill()
            server.wait()


def is_served(server: subprocess.Popen[str]) -> bool:
    """Asks, and waits for the answer."""
    assert server.stdin
    assert server.stdout
    server.stdin.write(json.dumps({"jsonrpc": "2.0", "id": 1, "method": "ping"}) + "\n")
    server.stdin.flush()
    return bool(json.loads(server.stdout.readline())["id"] == 1)


def test_a_signal_ends_it_in_order(place: Path) -> None:
    """Whichever; the servers are started concurrently, which takes the longest."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    with ExitStack() as stack:
        servers = {}
        for number in numbers:
            (place / number.name).mkdir()
            servers[number] = stack.enter_context(served(place / number.name))
        assert all(map(is_served, servers.values()))
        for number, server in servers.items():
            before = mounts()
            server.send_signal(number)
            assert server.wait(SECONDS_MAX) == 0
            assert len(mounts()) < len(before), number
        assert mounts() == []


def created(server: subprocess.Popen[str], name: str, *, is_kept: bool = False) -> None:
    """Introduces itself, has a branch made, and waits for the answer."""
    for message in (*introduction(), tool(3, "branch_create", name=name)):
        ask(server, message)
    if is_kept:
        ask(server, tool(4, "branch_keep", branch=name))


def introduction() -> list[dict[str, Any]]:
    """Returns the first messages of a client."""
    client = {"name": "test", "version": "1"}
    about = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client}
    return [
        {"jsonrpc": "2.0", "id": 2, "method": "initialize", "params": about},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
    ]


def tool(number: int, name: str, /, **arguments: Any) -> dict[str, Any]:
    """A call of a tool."""
    params = {"name": name, "arguments": arguments}
    return {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}


def send(server: subprocess.Popen[str], message: dict[str, Any]) -> None:
    assert server.stdin
    server.stdin.write(json.dumps(message) + "\n")
    server.stdin.flush()


def ask(server: subprocess.Popen[str], message: dict[str, Any]) -> None:
    """Sends a message, and waits for the answer to a request."""
    send(server, message)
    if "id" not in message:
        return
    assert server.stdout
    while (answer := json.loads(server.stdout.readline())).get("id") != message["id"]:
        pass
    assert not answer["result"].get("isError"), answer


def test_branches_of_a_killed_server_are_reported_and_dropped_by_the_next(project: Path) -> None:
    """The candidates of its races too; not what was kept, nor what a server that lives has made."""
    with served(project) as living, served(project) as killed, served(project) as keeping:
        created(living, "living")
        created(killed, "left")
        created(keeping, "kept", is_kept=True)
        send(killed, tool(5, "branch_speculate", candidates=["exec sleep 600", "exec sleep 601"]))
        until(lambda: claimed(project).count(" speculate-") == 2, "both are claimed")
        for server in (killed, keeping):
            server.kill()
            server.wait()
        listed = branching(project, "ls")
        names = [line.split()[0] for line in listed.out.splitlines()]
        tried = names[3:]
        assert names[:3] == ["living", "left", "kept"]
        assert [name[:10] for name in tried] == ["speculate-"] * 2
        left = ", ".join(("left", *tried))
        assert f"left by an MCP server that was killed: {left}." in listed.err
        with served(project) as after:
            assert is_served(after)
            listed = branching(project, "ls")
            assert [line.split()[0] for line in listed.out.splitlines()] == ["living", "kept"]
            assert listed.err == ""
            after.send_signal(signal.SIGTERM)
            assert after.wait(SECONDS_MAX) == 0
            assert after.stderr
            dropped = f"dropped what a server that was killed has left: {left}\n"
            assert dropped in after.stderr.read()
    assert branching(project, "abort", "kept").code == 0
    assert branching(project, "prune").code == 0  # the output of a race stays until then
    assert not (project / ".branching").exists()


def claimed(project: Path) -> str:
    """Returns the files in which servers record their branches."""
    return "".join(
        path.read_text() for path in (project / ".branching" / "agents").glob("claims-*")
    )


def test_a_signal_before_it_serves_ends_it_too(project: Path) -> None:
    with served(project) as server:
        until(mounts, "it is mounted")
        server.send_signal(signal.SIGTERM)
        assert server.wait(SECONDS_MAX) in (0, 128 + signal.SIGTERM)  # whenever it came
        assert mounts() == []


def test_an_invalid_message_does_not_end_the_server(project: Path) -> None:
    with served(project) as server:
        assert server.stdin
        assert server.stdout
        server.stdin.write("this is no message\n")
        assert is_served(server)
        server.stdin.close()
        server.stdin = None
        assert server.wait(SECONDS_MAX) == 0
        assert server.stdout.read() == ""


# HTTP.


@contextmanager
def over_http(project: Path, *words: str, token: str = TOKEN) -> Iterator[tuple[int, str]]:
    """Yields the port, and the token that was shown."""
    environment = {"BRANCHING_MCP_TOKEN": token} if token else {}
    with served(project, "--http", "0", *words, **environment) as server:
        assert server.stderr
        line = server.stderr.readline()
        assert line.startswith("branching mcp: http://127.0.0.1:"), line + server.stderr.read()
        shown = token or server.stderr.readline().removeprefix("branching mcp: token ").strip()
        yield int(line.rsplit(":", 1)[1].split("/")[0]), shown


@contextmanager
def request(port: int, **headers: str) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS_MAX)
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
    usual = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "Authorization": f"Bearer {TOKEN}",
    }
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    kept = {name: value for name, value in {**usual, **named}.items() if value}
    try:
        connection.request("POST", "/mcp", body, kept)
        yield connection.getresponse()
    finally:
        connection.close()


def test_requests_without_the_token_are_refused(project: Path) -> None:
    with over_http(project) as (port, _):
        for headers, status in (
            ({"Authorization": ""}, 401),
            ({"Authorization": f"Bearer {TOKEN}x"}, 401),
            ({"Authorization": "Bearer "}, 401),
            ({"Authorization": f"Basic {TOKEN}"}, 401),
            ({"Host": "evil.example"}, 421),
            ({"Host": f"evil.example:{port}"}, 421),
            ({"Origin": "http://evil.example"}, 403),
            ({"Origin": "http://localhost:1"}, 403),
        ):
            with request(port, **headers) as response:
                assert response.status == status, headers
        for headers in ({}, {"Origin": f"http://localhost:{port}"}, {"Host": f"localhost:{port}"}):
            with request(port, **headers) as response:
                assert response.status not in (401, 403, 421), headers
        # It listens on no other address.
        rows = Path("/proc/net/tcp").read_text().splitlines()
        assert [row.split()[1] for row in rows if f":{port:04X} 00000000:0000 0A" in row] == [
            f"0100007F:{port:04X}"
        ]


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_whole_session_over_http(project: Path, mode: str) -> None:
    with over_http(project, token="" if mode == "auto" else TOKEN) as (port, token):
        assert len(token) >= len(TOKEN)  # one is made where none was given
        headers = {"Authorization": f"Bearer {token}"}
        url = f"http://127.0.0.1:{port}/mcp"
        async with create_mcp_http_client(headers=headers) as carrier:
            transport = streamable_http_client(url, http_client=carrier)
            async with connected(transport, mode=mode, roots=[project]) as agent:
                await agent.call("branch_create", name="b")
                ran = await agent.call("branch_run", branch="b", command="env; touch x")
                assert "BRANCHING_BRANCH=b" in ran["output"]
                assert token not in ran["output"]
                await agent.call("branch_commit", branch="b")
                raced = await agent.call(
                    "branch_speculate", candidates=["false", "touch y"], commit=True
                )
                assert raced["committed"]
                await agent.call("branch_create", name="left")
                await agent.hears("[")
    assert (project / "x").exists()
    assert (project / "y").exists()
    assert mounts() == []
    assert ls(project) == []


HTTP_CLIENT = """
import sys, anyio
sys.path[:0] = {path!r}
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from support.tools import connected

async def main():
    async with create_mcp_http_client(headers={headers!r}) as carrier:
        transport = streamable_http_client({url!r}, http_client=carrier)
        async with connected(transport, mode={mode!r}) as agent:
            await agent.call({tool!r}, **{arguments!r})

anyio.run(main)
"""
OLD_HTTP_CLIENT = """
import anyio
from importlib.metadata import version
from mcp import ClientSession
from mcp.client.streamable_http import streamablehttp_client

assert version("mcp") == {mode!r}

async def main():
    async with streamablehttp_client({url!r}, headers={headers!r}) as (reads, writes, _):
        async with ClientSession(reads, writes) as session:
            await session.initialize()
            await session.call_tool({tool!r}, {arguments!r})

anyio.run(main)
"""
"""For version 1 of the protocol's library, which `scripts/setup` installs."""
OLD_VERSION = "1.30.0"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
OLD_PYTHON = CACHE / "branching-tools" / f"mcp-{OLD_VERSION}" / "bin" / "python"


@pytest.mark.parametrize("mode", ["auto", "legacy", OLD_VERSION])
def test_a_race_ends_when_its_http_client_is_killed(project: Path, mode: str) -> None:
    """With each generation of the protocol, and of its library."""
    is_old = mode == OLD_VERSION
    assert not is_old or OLD_PYTHON.exists(), "scripts/setup installs it"
    mark = str(os.getpid())
    command = f"touch landed; exec sleep 62{mark}"
    with over_http(project) as (port, token):
        script = (OLD_HTTP_CLIENT if is_old else HTTP_CLIENT).format(
            path=[entry for entry in sys.path if entry.endswith("tests/python")],
            headers={"Authorization": f"Bearer {token}"},
            url=f"http://127.0.0.1:{port}/mcp",
            mode=mode,
            tool="branch_speculate",
            arguments={"candidates": [command], "commit": True},
        )
        python = str(OLD_PYTHON) if is_old else sys.executable
        client = subprocess.Popen([python, "-c", script])
        try:
            until(
                lambda: processes_with(f"sleep\x0062{mark}") or client.poll() is not None,
                "the candidate that runs",
            )
            assert client.poll() is None, "the client ended by itself"
        finally:
            client.kill()
            client.wait()
        until(lambda: not processes_with(f"sleep\x0062{mark}"), "the end of the candidate")
        until(lambda: not ls(project), "the end of its branch")
        with request(port) as response:  # the server is there for others
            assert response.status != 401
    assert not (project / "landed").exists()


@pytest.mark.parametrize(
    ("words", "token", "says"),
    [
        (["--http", "0", "--token-file", "open"], "", "chmod 600"),
        (["--http", "0", "--token-file", "short"], "", "less than 16 characters"),
        (["--http", "0"], "short", "less than 16 characters"),
        (["--token-file", "good"], "", "--token-file is for --http"),
        (["--hide", "/etc/passwd"], "", "is not a glob"),
        (["--hide", "../x"], "", "is not a glob"),
    ],
)
def test_an_unsafe_token_is_refused(project: Path, words: list[str], token: str, says: str) -> None:
    for name, text, mode in (("open", TOKEN, 0o644), ("short", "x", 0o600), ("good", TOKEN, 0o600)):
        (project / name).write_text(text)
        (project / name).chmod(mode)
    environment = {"BRANCHING_MCP_TOKEN": token} if token else {}
    done = branching(project, "mcp", *words, **environment)
    assert done.code == 2
    assert says in done.err
    assert not (project / ".branching").exists()


def test_a_used_port_is_an_error(project: Path) -> None:
    with over_http(project) as (port, _):
        done = branching(project, "mcp", "--http", str(port))
        assert done.code == 125
        assert "Address already in use" in done.err


def test_without_its_extra_the_error_names_what_to_install(project: Path) -> None:
    script = "import sys; sys.modules['mcp'] = None; from branching.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "mcp"],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.strip().endswith('needs its extra: pip install ".[mcp]" in the source tree')


@pytest.mark.anyio
async def test_waiting_commands_do_not_block_other_requests() -> None:
    """There are more waiting commands than shared threads."""
    done = threading.Event()

    async def wait() -> None:
        await run_long(lambda: done.wait(SECONDS_MAX), name="waits")

    async with anyio.create_task_group() as group:
        for _ in range(100):
            group.start_soon(wait)
        assert await run_short(lambda: "served") == "served"
        done.set()
