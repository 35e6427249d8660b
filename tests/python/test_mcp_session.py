"""The tools of the Python session."""

from __future__ import annotations

import asyncio

import anyio
import pytest
from conftest import Mounted
from support.tools import connected, over_stdio, served
from support.traces import processes_in_namespace

from branching import Workspace

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["auto", "legacy"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_a_session_forks_and_its_winner_is_committed(
    real_workspace: Workspace, mode: str
) -> None:
    base = real_workspace.base
    async with connected(served(real_workspace), mode=mode) as agent:
        first = await agent.call(
            "session_run", code="x = 1; log = open('log', 'a'); print('up')\nx + 1"
        )
        assert (first["success"], first["value"], first["output"]) == (True, "2", "up")
        forked = await agent.call("session_fork", n=2)
        assert forked["children"] == [0, 1]
        for child in (0, 1):
            code = f"x += {10 * (child + 1)}; log.write('{child}'); log.flush()"
            assert (await agent.call("session_run", code=code, child=child))["child"] == child
        assert "the session has forked" in await agent.refused("session_run", code="1")
        assert "no child 2" in await agent.refused("session_run", code="1", child=2)
        picked = await agent.call("session_pick", child=1)
        assert [each["path"] for each in picked["changes"]] == ["log"]
        assert (await agent.call("session_run", code="x"))["value"] == "21"
        branch = picked["branch"]
        refused = await agent.refused("branch_commit", branch=branch)
        assert "something still runs in branch" in refused
        assert "session_end" in refused
        ended = await agent.call("session_end")
        assert (ended["branch"], ended["action"]) == (branch, "kept")
        assert not (base / "log").exists()
        await agent.call("branch_commit", branch=branch)
        assert (base / "log").read_text() == "1"
        assert "there is no session" in await agent.refused("session_end")


async def test_all_children_can_be_dropped(real_workspace: Workspace) -> None:
    async with connected(served(real_workspace)) as agent:
        await agent.call("session_run", code="x = 1")
        await agent.call("session_fork", n=2)
        await agent.call("session_run", code="x = 2", child=0)
        assert (await agent.call("session_pick", child=None))["changes"] == []
        assert (await agent.call("session_run", code="x"))["value"] == "1"


async def test_a_failure_has_its_traceback_and_the_session_continues(
    real_workspace: Workspace,
) -> None:
    async with connected(served(real_workspace)) as agent:
        failed = await agent.call("session_run", code="x = 3\n1 / 0")
        assert not failed["success"]
        assert "ZeroDivisionError: division by zero" in failed["error"]
        late = await agent.refused(
            "session_run", code="import time; time.sleep(600)", timeout_seconds=0.3
        )
        assert "did not end within 0.3 s" in late
        assert "Its effects until then remain" in late
        await agent.call(
            "session_run", code="import subprocess; p = subprocess.Popen(['sleep', '300'])"
        )
        refused = await agent.refused("session_fork", n=2)
        assert "a running child process: sleep 300" in refused
        assert "Next: end or close it in the code" in refused
        assert (await agent.call("session_run", code="x"))["value"] == "3"


async def test_output_and_value_together_stay_within_an_answer(real_workspace: Workspace) -> None:
    async with connected(served(real_workspace)) as agent:
        ran = await agent.call("session_run", code="print('x' * 50_000); 'y' * 50_000")
        assert ran["truncated"]
        assert ran["output"].startswith("xxx")
        assert ran["value"].startswith("'yyy")
        assert len(ran["output"]) + len(ran["value"]) < 20_000


async def test_calls_in_two_children_run_at_the_same_time(real_workspace: Workspace) -> None:
    code = "import time\nopen('/tmp/{own}', 'w').close()\nimport os\nwhile not os.path.exists('/tmp/{other}'): time.sleep(0.01)"
    async with connected(served(real_workspace)) as agent:
        await agent.call("session_run", code="1")
        await agent.call("session_fork", n=2)
        cells = await asyncio.gather(
            agent.call(
                "session_run", code=code.format(own=0, other=1), child=0, timeout_seconds=60
            ),
            agent.call(
                "session_run", code=code.format(own=1, other=0), child=1, timeout_seconds=60
            ),
        )
        assert [cell["success"] for cell in cells] == [True, True]


async def test_aborting_the_branch_ends_the_session(real_workspace: Workspace) -> None:
    async with connected(served(real_workspace)) as agent:
        await agent.call("session_run", code="open('made', 'w').close()")
        branch = (await agent.call("session_fork", n=2))["branch"]
        dropped = await agent.call("branch_abort", branch=branch)
        assert [each["path"] for each in dropped["changes"]] == ["made"]
        assert (await agent.call("branch_list"))["branches"] == []
        assert "there is no session" in await agent.refused("session_fork", n=2)
        assert (await agent.call("session_run", code="2"))["value"] == "2"


async def test_a_session_cannot_read_what_the_server_hides(real_workspace: Workspace) -> None:
    (real_workspace.base / ".env").write_text("TOKEN=1\n")
    async with connected(served(real_workspace, hide=("**/.env",))) as agent:
        await agent.call("session_run", code="1")
        await agent.call("session_fork", n=1)
        done = await agent.call("session_run", code="open('.env').read()", child=0)
        assert "Permission denied" in str(done)


async def test_the_end_of_the_server_ends_the_session(
    real: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(over_stdio(real.root, monkeypatch=monkeypatch)) as agent:
        found = await agent.call("session_run", code="import os; os.readlink('/proc/self/ns/pid')")
        await agent.call("session_fork", n=2)
    assert not processes_in_namespace(found["value"].strip("'"))
    with Workspace(real.root) as space:
        assert space.branches() == []


async def test_a_cancelled_call_interrupts_its_code(real_workspace: Workspace, mode: str) -> None:
    async with connected(served(real_workspace), mode=mode) as agent:
        await agent.call("session_run", code="x = 4")
        with anyio.move_on_after(1) as scope:
            await agent.call("session_run", code="import time; time.sleep(600)")
        assert scope.cancelled_caught
        assert (await agent.call("session_run", code="x", timeout_seconds=30))["value"] == "4"
