"""A plain function runs the branches of a fork."""

from __future__ import annotations

import asyncio

import pytest
from support.agents import run

from branching import Workspace
from branching.agent import (
    BranchRuntime,
    BranchSpec,
    ForkCoordinator,
    ForkStateError,
    InMemoryCheckpointStore,
    RunOutcome,
    callable_runner,
)


def test_a_text_is_a_message_and_an_outcome_is_the_conversation(real_workspace: Workspace) -> None:
    async def work(branch: BranchRuntime, prompt: str, history: object) -> RunOutcome | str:
        assert branch.path is not None
        (branch.path / branch.spec.label).write_text(prompt)
        if branch.spec.label == "text":
            return "written"
        return RunOutcome(history=[{"role": "assistant", "content": repr(history)}])

    async def test() -> None:
        async with ForkCoordinator(
            runner=callable_runner(work),
            place=real_workspace,
            checkpoint_store=InMemoryCheckpointStore(),
        ) as coordinator:
            said = [{"role": "user", "content": "before"}]
            handle = await coordinator.fork(
                [BranchSpec("text", "one"), BranchSpec("outcome", "two")], parent_history=said
            )
            assert [status.state for status in await coordinator.wait()] == ["done", "done"]
            text, outcome = coordinator.branches.values()
            assert text.history == [
                *said,
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": "written"},
            ]
            assert outcome.history == [{"role": "assistant", "content": repr(said)}]
            merged = await coordinator.merge_or_select(f"pick:{handle.branches[0].id}")
            assert merged.history_after_merge == text.history

    run(test())
    assert (real_workspace.path / "text").read_text() == "one"


def test_wait_returns_when_no_branch_runs_also_after_a_stop() -> None:
    begun = asyncio.Event()

    async def work(branch: BranchRuntime, prompt: str, history: object) -> str:
        if branch.spec.label == "quick":
            return prompt
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError("it is cancelled")

    async def test() -> None:
        async with ForkCoordinator(
            runner=callable_runner(work), checkpoint_store=InMemoryCheckpointStore()
        ) as coordinator:
            assert await coordinator.wait() == []
            await coordinator.fork([BranchSpec("quick", "a"), BranchSpec("slow", "b")])
            waiting = asyncio.create_task(coordinator.wait())
            await begun.wait()
            quick, slow = coordinator.branches.values()
            assert quick.task is not None
            await quick.task
            assert not waiting.done()
            with pytest.raises(ForkStateError, match="cannot receive messages"):
                coordinator.steer(slow.id, "hurry")
            await coordinator.terminate_branch(slow.id)
            assert [status.state for status in await waiting] == ["done", "terminated"]
            assert slow.partial_history == [{"role": "user", "content": "b"}]

    run(test())
