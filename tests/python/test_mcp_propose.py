"""Commits of the MCP server: races leave them to the agent, --propose leaves them to the user."""

from __future__ import annotations

from pathlib import Path

import mcp_types
import pytest
from support.command import branching
from support.tools import connected, over_stdio, served

from branching import Workspace

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["auto", "legacy"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("tool", ["branch_speculate", "branch_best_of_n"])
async def test_a_race_says_how_its_winner_is_committed(
    real_workspace: Workspace, tool: str, mode: str
) -> None:
    async with connected(served(real_workspace), mode=mode) as agent:
        raced = await agent.client.call_tool(tool, {"candidates": ["touch made", "false"]})
        facts = raced.structured_content
        assert facts is not None
        assert (facts["committed"], facts["winner"]) == (False, 0)
        assert not (real_workspace.base / "made").exists()
        name = facts["branch"]
        (content,) = raced.content
        assert isinstance(content, mcp_types.TextContent)
        assert (
            f'Next: review it with branch_diff, then call branch_commit with branch="{name}"'
            in (content.text)
        )
        await agent.call("branch_commit", branch=name)
        assert (real_workspace.base / "made").exists()


async def test_the_names_of_the_first_version_can_still_be_called(
    real_workspace: Workspace, mode: str
) -> None:
    async with connected(served(real_workspace), mode=mode) as agent:
        listed = {tool.name for tool in (await agent.client.list_tools()).tools}
        assert not listed & {"speculate", "best_of_n", "history", "undo", "redo"}
        raced = await agent.call("speculate", candidates=["touch made"], commit=True)
        assert raced["committed"]
        assert len((await agent.call("history"))["commits"]) == 1
        assert (await agent.call("undo"))["done"]
        assert (await agent.call("redo"))["done"]
        assert (await agent.call("best_of_n", candidates=["false"]))["winner"] is None


async def test_an_agent_that_proposes_cannot_commit(real_workspace: Workspace, mode: str) -> None:
    base = real_workspace.base
    async with connected(served(real_workspace, propose=True), mode=mode) as agent:
        listed = {tool.name for tool in (await agent.client.list_tools()).tools}
        gone = ("branch_commit", "branch_undo", "branch_redo", "undo", "redo")
        assert not listed & {*gone}
        assert "only the user commits" in (agent.client.instructions or "")
        made = await agent.call("branch_create", name="idea")
        assert made["kept"]
        await agent.call("branch_write", branch="idea", path="idea.txt", content="x")
        await agent.call("branch_create", name="empty")
        for tool in gone:
            answer = await agent.client.call_tool(tool, {"branch": "idea"})
            assert answer.is_error
        for tool in ("branch_speculate", "branch_best_of_n"):
            said = await agent.refused(tool, candidates=["touch made"], commit=True)
            assert "the user commits them" in said
        raced = await agent.call("branch_speculate", candidates=["touch made"])
        assert f"tell the user to run `branching commit {raced['branch']}`" in raced["next"]
        assert sorted(path.name for path in base.iterdir()) == [".branching", "seed.txt"]
    left = {record.name for record in real_workspace.branches()}
    assert left == {"idea", raced["branch"]}  # the empty one is nobody's loss
    real_workspace.reopen("idea").commit()
    real_workspace.reopen(raced["branch"]).abort()
    assert (base / "idea.txt").exists()


async def test_proposed_branches_survive_a_killed_server(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = place / "project"
    project.mkdir()
    server = over_stdio(project, "--propose", monkeypatch=monkeypatch)
    async with connected(server) as agent:
        await agent.call("branch_create", name="idea")
        await agent.call("branch_write", branch="idea", path="idea.txt", content="x")
        assert not list(project.glob(".branching/agents/claims-*"))  # by which the next drops it
    done = branching(project, "commit", "idea")
    assert done.code == 0, done.err
    assert (project / "idea.txt").exists()


@pytest.mark.parametrize("propose", [True, False])
async def test_prompts_name_tools_that_there_are(
    real_workspace: Workspace, mode: str, propose: bool
) -> None:
    async with connected(served(real_workspace, propose=propose), mode=mode) as agent:
        tools = {tool.name for tool in (await agent.client.list_tools()).tools}
        prompts = {each.name: each for each in (await agent.client.list_prompts()).prompts}
        assert set(prompts) == {"try_three_ways", "repair_until_tests_pass"}
        for name, arguments in (
            ("try_three_ways", {"task": "make it faster", "check": "make test"}),
            ("repair_until_tests_pass", {"tests": "make test"}),
        ):
            assert prompts[name].description
            assert all(each.description for each in prompts[name].arguments or ())
            (message,) = (await agent.client.get_prompt(name, arguments)).messages
            assert isinstance(message.content, mcp_types.TextContent)
            text = message.content.text
            assert all(value in text for value in arguments.values())
            words = {word.strip(".,:;()") for word in text.split()}
            named = {word for word in words if word.startswith("branch_")}
            assert named <= tools, named - tools
            assert ("branch_commit" in named) is not propose
