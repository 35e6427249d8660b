"""The dependencies of a branch's run, and the runner that a fork is given."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from conftest import Mounted
from pydantic_ai import Agent, RunContext
from pydantic_ai.messages import ModelMessage, ModelResponse

from branching import Workspace
from branching.agent.checkpoint import InMemoryCheckpointStore
from branching.agent.coordinator import ForkCoordinator
from branching.agent.errors import ForkStateError
from branching.agent.pydantic_ai import LiveForkCapability
from branching.agent.pydantic_ai.deps import branch_deps
from branching.agent.types import BranchIsolation, BranchSpec

from .scripted import call, model_of, prompts, returned, say, since_prompt

SECONDS_MAX = 100


class BoundedQueue:
    """A queue of an application, which cannot be made without its size."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.messages = ["for the parent"]


class ClearableQueue(BoundedQueue):
    """A queue that can be emptied."""

    def clear(self) -> None:
        self.messages.clear()


@dataclass(frozen=True)
class FrozenDeps:
    """Dependencies that cannot be assigned to."""

    fork_coordinator: Any = None
    todos: list[str] = field(default_factory=list)
    message_queue: Any = field(default_factory=list)


class TupleDeps(NamedTuple):
    """Dependencies as a tuple with names."""

    todos: list[str]


@dataclass
class QueueDeps:
    """Dependencies with a queue."""

    message_queue: Any


def test_a_branch_has_its_own_copy_of_frozen_dependencies() -> None:
    deps = FrozenDeps(fork_coordinator="parent", todos=["milk"], message_queue=["hello"])
    own = branch_deps(deps, BranchIsolation())
    assert own == FrozenDeps(fork_coordinator=None, todos=[], message_queue=[])
    assert deps == FrozenDeps(fork_coordinator="parent", todos=["milk"], message_queue=["hello"])


def test_a_branch_has_its_own_copy_of_a_named_tuple() -> None:
    assert branch_deps(TupleDeps(["milk"]), BranchIsolation()) == TupleDeps([])


def test_a_queue_that_needs_arguments_is_copied_and_emptied() -> None:
    deps = QueueDeps(ClearableQueue(5))
    own = branch_deps(deps, BranchIsolation())
    assert (own.message_queue.size, own.message_queue.messages) == (5, [])
    assert deps.message_queue.messages == ["for the parent"]


def test_a_queue_that_can_be_neither_made_nor_emptied_is_refused() -> None:
    deps = QueueDeps(BoundedQueue(5))
    with pytest.raises(ForkStateError, match=r"'message_queue'.*BoundedQueue") as refused:
        branch_deps(deps, BranchIsolation())
    assert "clone_for_branch" in str(refused.value.hint)
    shared = branch_deps(deps, BranchIsolation(message_queue="shared"))
    assert shared.message_queue is deps.message_queue


def _run(deps: Any, *, workspace: Workspace | None = None) -> tuple[str, list[Any], str]:
    """Runs an agent that forks, waits and merges; returns what the fork answered, what the branch
    got as its dependencies, and the parent's last words."""
    kept: list[Any] = []
    told: list[str] = []

    def model(messages: list[ModelMessage]) -> ModelResponse:
        if prompts(messages)[-1] == "look":
            return call("look") if since_prompt(messages) == 0 else say("looked")
        if not returned(messages, "fork_run"):
            return call("fork_run", specs=[{"label": "own", "steer": "look"}])
        if not returned(messages, "finish_fork"):
            told.extend(returned(messages, "fork_run"))
            return call("finish_fork")
        return say("end")

    agent: Agent[Any, str] = Agent(
        model_of(model),
        deps_type=object,
        capabilities=[
            LiveForkCapability(place=workspace, checkpoint_store=InMemoryCheckpointStore())
        ],
    )

    @agent.tool
    def look(ctx: RunContext[Any]) -> str:
        kept.append(ctx.deps)
        return "seen"

    @agent.tool
    async def finish_fork(ctx: RunContext[Any]) -> str:
        found: list[Any] = []
        assert ctx.root_capability is not None
        ctx.root_capability.apply(found.append)
        (fork,) = [part for part in found if isinstance(part, LiveForkCapability)]
        assert fork.coordinator is not None
        if not fork.coordinator.is_resolved:
            await asyncio.wait({b.task for b in fork.coordinator.branches.values() if b.task})
            await fork.coordinator.abort_fork()
        return "finished"

    output = asyncio.run(asyncio.wait_for(agent.run("go", deps=deps), SECONDS_MAX)).output
    return told[0], kept, output


def test_a_run_with_frozen_dependencies_forks() -> None:
    deps = FrozenDeps(todos=["milk"])
    told, kept, output = _run(deps)
    assert told.startswith("Forked: ")
    assert output == "end"
    assert kept[0].todos == []
    assert deps.fork_coordinator is None, "a frozen object is not written to"


def test_a_queue_that_is_refused_is_the_tools_answer_and_leaves_no_branch(
    real_workspace: Workspace,
) -> None:
    told, kept, output = _run(QueueDeps(BoundedQueue(5)), workspace=real_workspace)
    assert told.startswith("fork_run failed: ")
    assert "message_queue" in told
    assert (kept, output) == ([], "end")
    assert real_workspace.branches() == []


class Runless:
    """An object that looks like a runner: it has `stop`, but no `run`."""

    def __init__(self, branch: Any) -> None:
        self.branch = branch

    def steer(self, text: str) -> None:
        """Does nothing."""

    async def stop(self) -> None:
        """Does nothing."""


def test_the_coordinator_refuses_a_runner_that_is_not_callable() -> None:
    with pytest.raises(TypeError, match="runner must be callable"):
        ForkCoordinator(runner="claude")  # type: ignore[arg-type]


@pytest.mark.parametrize("factory", [Runless, lambda branch: None], ids=["no method run", "None"])
def test_a_runner_that_cannot_run_is_refused_before_anything_is_forked(
    real: Mounted, factory: Any
) -> None:
    """The parent can be written to afterwards, and the coordinator forks with no leftover."""

    async def work(workspace: Workspace) -> None:
        made = ForkCoordinator(
            runner=factory, place=workspace, checkpoint_store=InMemoryCheckpointStore()
        )
        with pytest.raises(TypeError, match="run"):
            await made.fork([BranchSpec("a", "go")])
        assert made.is_resolved
        assert workspace.branches() == []
        (real.root / "free").touch()
        assert made.store.list_all() == []
        await made.aclose()

    with Workspace(real.root) as workspace:
        asyncio.run(asyncio.wait_for(work(workspace), SECONDS_MAX))
