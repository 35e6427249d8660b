"""Forks that the agent of a chat makes itself are the chat's: seen, merged and aborted there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from agent.scripted import call, prompts, returned, say
from pydantic_ai import Agent, RunContext
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel

from branching import Workspace
from branching.agent.pydantic_ai import LiveForkCapability
from branching.tui.chat.pydantic_agent import open_session
from branching.tui.chat.session import ChatSession
from branching.tui.chat.settings import SettingsFile
from branching.tui.chat.transcripts import OVERVIEW

SECONDS_MAX = 120.0
SPECS = [{"label": "one", "steer": "write one"}, {"label": "two", "steer": "write two"}]


def forking_agent(then: Callable[[list[ModelMessage]], ModelResponse]) -> Agent[Any, Any]:
    """An agent that forks when it hears `fork`, then does what `then` says."""

    def answer(messages: list[ModelMessage]) -> ModelResponse:
        prompt = prompts(messages)[-1]
        if prompt.startswith("write") and not returned(messages, "write"):
            return call("write", text=prompt)
        if prompt.startswith("write"):
            return say(f"did {prompt}")
        if prompt == "fork" and not returned(messages, "fork_run"):
            return call("fork_run", specs=SPECS)
        return then(messages)

    async def stream(messages: list[ModelMessage], _: AgentInfo) -> AsyncIterator[Any]:
        for number, part in enumerate(answer(messages).parts):
            if isinstance(part, ToolCallPart):
                yield {number: DeltaToolCall(part.tool_name, part.args_as_json_str())}
            elif isinstance(part, TextPart):
                yield part.content

    model = FunctionModel(stream_function=stream)
    agent: Agent[Any, Any] = Agent(model, capabilities=[LiveForkCapability()])

    @agent.tool
    async def write(ctx: RunContext[Any], text: str) -> str:
        """Write a file."""
        await ctx.workspace.run(f"echo {text} >made", shell=True)
        return "written"

    return agent


def chat(
    space: Workspace, place: Path, agent: Agent[Any, Any]
) -> Callable[[Callable[[ChatSession], Awaitable[None]]], None]:
    def run(act: Callable[[ChatSession], Awaitable[None]]) -> None:
        async def whole() -> None:
            session = await open_session(
                space, agent, settings=SettingsFile(place / "settings.json")
            )
            try:
                await asyncio.wait_for(act(session), SECONDS_MAX)
            finally:
                await session.close()

        asyncio.run(whole())
        assert space.branches() == []

    return run


def noted(session: ChatSession, tab: str = OVERVIEW) -> list[str]:
    session.tick()
    return [line.text for line in session.said.lines(tab) if line.who in ("note", "error")]


@pytest.mark.contract("A10")
def test_a_fork_that_the_agent_left_open_is_merged_in_the_chat(
    real_workspace: Workspace, tmp_path: Path
) -> None:
    agent = forking_agent(lambda messages: say(f"heard {prompts(messages)[-1]}"))

    async def act(session: ChatSession) -> None:
        await session.submit("fork")
        text = "The agent forked: one, two. Tab switches between them; /merge ends it."
        assert text in noted(session)
        assert session.is_forked
        assert session.adopted
        assert session.coordinator.goal == "fork"
        await session.coordinator.wait()
        one = session.branches[0]
        assert [line.text for line in session.said.lines(one.id) if line.who == "you"] == [
            "write one"
        ]
        assert await session.merging.pick(one.id)
        session.tick()
        assert not session.adopted
        assert (real_workspace.base / "made").read_text() == "write one\n"
        assert prompts(session.conversation.history)[-1] == "write one"
        await session.submit("go on")
        assert session.said.lines(OVERVIEW)[-1].text == "heard go on"

    chat(real_workspace, tmp_path, agent)(act)


@pytest.mark.contract("A10")
def test_an_agent_that_merges_its_fork_continues_from_the_winner(
    real_workspace: Workspace, tmp_path: Path
) -> None:
    def then(messages: list[ModelMessage]) -> ModelResponse:
        answers = returned(messages, "fork_run")
        if prompts(messages)[-1] == "fork" and not returned(messages, "merge_or_select"):
            second = next(line for line in answers[-1].splitlines() if line.endswith("(two)"))
            return call("merge_or_select", action=f"pick:{second.split()[1]}")
        return say("merged")

    async def act(session: ChatSession) -> None:
        await session.submit("fork")
        session.tick()
        assert not session.is_forked
        assert (real_workspace.base / "made").read_text() == "write two\n"
        assert "write two" in prompts(session.conversation.history)
        assert session.said.lines(OVERVIEW)[-1].text == "merged"

    chat(real_workspace, tmp_path, forking_agent(then))(act)


def test_a_run_that_is_stopped_leaves_its_fork_to_the_person(
    real_workspace: Workspace, tmp_path: Path
) -> None:
    """Escape stops the run first, and a second one aborts the fork. /merge waits for the run."""
    agent = forking_agent(lambda _: call("wait"))

    @agent.tool_plain
    async def wait() -> str:
        """Wait."""
        await asyncio.Event().wait()
        return ""

    async def act(session: ChatSession) -> None:
        said = asyncio.create_task(session.submit("fork"))
        while not session.is_forked:
            await asyncio.sleep(0.02)
        await session.submit("/merge")
        assert any("the agent is running" in text for text in noted(session))
        assert session.what_escape_stops() == "Stop the run?"
        await session.stop()
        await said
        assert session.is_forked
        assert session.what_escape_stops() == "Abort the fork, with all its 2 branches?"
        await session.stop()
        assert not session.is_forked
        assert not (real_workspace.base / "made").exists()

    chat(real_workspace, tmp_path, agent)(act)
