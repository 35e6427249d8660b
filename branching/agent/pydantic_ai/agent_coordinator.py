"""A coordinator for the runs of an agent, in one call."""

from __future__ import annotations

from typing import Any

from pydantic_ai import Agent

from branching.agent.branch_runtime import BranchRuntime
from branching.agent.coordinator import ForkCoordinator
from branching.agent.judge import Panel
from branching.agent.pydantic_ai.codec import MessagesCodec
from branching.agent.pydantic_ai.judge import model_judge
from branching.agent.pydantic_ai.runner import AgentRunner, RunnerOptions
from branching.fs import Branch, Workspace


def agent_coordinator(
    agent: Agent[Any, Any],
    place: Workspace | Branch | None = None,
    *,
    deps: Any = None,
    runs: RunnerOptions | None = None,
    **options: Any,
) -> ForkCoordinator:
    """Returns a coordinator whose branches run the agent. Nothing is forked yet.

    Args:
        agent: Runs in each branch, on its own model unless the branch's spec names one.
        place: The workspace or branch to fork; None forks conversations only.
        deps: The dependencies of the runs; each branch gets its own of them.
        runs: How the runs are made: prices, events, toolsets.
        options: Of `ForkCoordinator`. Without `judge` the strategy's models are asked.
    """
    how = runs or RunnerOptions()
    options.setdefault("judge", Panel(model_judge=lambda name: model_judge(name, price=how.price)))

    def runner(branch: BranchRuntime) -> AgentRunner:
        return AgentRunner(agent, branch, how, coordinator=coordinator)

    coordinator = ForkCoordinator(
        agent, deps, runner=runner, codec=MessagesCodec(), place=place, **options
    )
    return coordinator
