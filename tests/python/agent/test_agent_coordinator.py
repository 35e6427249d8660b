"""A coordinator made of an agent in one call."""

from __future__ import annotations

import pytest
from pydantic_ai.messages import ModelMessage, ModelResponse
from support.agents import run

from branching import Workspace
from branching.agent.checkpoint import InMemoryCheckpointStore
from branching.agent.judge import JudgeError
from branching.agent.pydantic_ai import RunnerOptions, agent_coordinator
from branching.agent.types import BranchSpec, MergeStrategy

from .scripted import call, model_of, prompts, returned, say, since_prompt, working_agent

SPECS = [BranchSpec("one", "echo 1 > one"), BranchSpec("two", "echo 2 > two")]


def _answer(messages: list[ModelMessage]) -> ModelResponse:
    if since_prompt(messages) == 0:
        return call("shell", command=prompts(messages)[-1])
    return say(returned(messages)[-1])


def test_its_branches_run_the_agent_in_files_of_their_own(real_workspace: Workspace) -> None:
    async def work() -> None:
        agent = working_agent(model_of(_answer))
        checkpoints = InMemoryCheckpointStore()
        how = RunnerOptions(price=lambda *_: 0.5)
        async with agent_coordinator(
            agent, real_workspace, runs=how, checkpoint_store=checkpoints
        ) as coordinator:
            handle = await coordinator.fork(SPECS)
            assert [status.state for status in await coordinator.wait()] == ["done", "done"]
            assert coordinator.fork_cost().aggregate_usd == 2.0
            merged = await coordinator.merge_or_select(f"pick:{handle.branches[1].id}")
            assert prompts(merged.history_after_merge or []) == ["echo 2 > two"]

    run(work())
    assert (real_workspace.path / "two").read_text() == "2\n"
    assert not (real_workspace.path / "one").exists()


def test_without_a_judge_the_strategys_model_is_asked() -> None:
    async def work() -> None:
        agent = working_agent(model_of(lambda _: say("done")))
        checkpoints = InMemoryCheckpointStore()
        async with agent_coordinator(agent, checkpoint_store=checkpoints) as coordinator:
            await coordinator.fork(SPECS)
            with pytest.raises(JudgeError, match="chose 'a', which is none of"):  # by TestModel
                await coordinator.resolve(MergeStrategy(kind="auto", judge_model="test"))

    run(work())
