"""One branch as a run of a pydantic-ai agent.

    Meter        sits in the run: reserves each request before it is sent, keeps the conversation as
                 it is sent, turns the approval of a tool into a question of the branch
    AgentRunner  makes the run: the agent, the branch's model, instructions, workspace, dependencies

A context variable has the branch of a run. pydantic-ai propagates it to all tasks of the run, so a
tool that forks finds its branch there.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from pydantic_ai import (
    Agent,
    AgentRun,
    DeferredToolRequests,
    DeferredToolResults,
    RunContext,
    ToolDenied,
)
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.messages import ModelResponse, ToolCallPart, WorkspaceRef
from pydantic_ai.models import ModelRequestContext
from pydantic_ai.usage import UsageLimits
from pydantic_ai.workspaces import ReadOnlyWorkspace, Workspace

from branching import fs
from branching._threads import run_in_thread
from branching.agent.branch_runtime import BranchRuntime
from branching.agent.coordinator import ForkCoordinator
from branching.agent.errors import ForkStateError
from branching.agent.external_edits import describe_edits
from branching.agent.judge import Panel
from branching.agent.protocols import History, RunOutcome
from branching.agent.pydantic_ai.codec import MessagesCodec, last_text, moved, workspace_of
from branching.agent.pydantic_ai.deps import branch_deps
from branching.agent.pydantic_ai.judge import model_judge
from branching.agent.pydantic_ai.pricing import Price, expected, is_priced, listed_price, used
from branching.agent.pydantic_ai.workspace import BranchWorkspace
from branching.agent.sandbox import BranchSandbox

OnEvent = Callable[[BranchRuntime, Any], None]
"""Receives the events of a branch's run, including single tokens."""

current_branch: ContextVar[BranchRuntime | None] = ContextVar("current_branch", default=None)
"""The branch that the code runs for."""
host_coordinator: ContextVar[tuple[Any, ForkCoordinator] | None] = ContextVar(
    "host_coordinator", default=None
)
"""An agent, and the coordinator that its forks belong to in a program that shows them (the chat).

The program decides about a fork that is open when the run ends, however the run ends.
"""
current_coordinator: ContextVar[ForkCoordinator | None] = ContextVar(
    "current_coordinator", default=None
)
"""The coordinator of that branch, for nested forks."""


class Meter(AbstractCapability[Any]):
    """The branch's account and ear in a run."""

    def __init__(
        self,
        branch: BranchRuntime,
        price: Price,
        home: WorkspaceRef | None,
        *,
        tells_edits: bool = False,
    ) -> None:
        self._branch = branch
        self._price = price
        self._home = home
        self._tells_edits = tells_edits

    async def wrap_model_request(
        self, ctx: RunContext[Any], *, request_context: ModelRequestContext, handler: Any
    ) -> ModelResponse:
        # Before it can be refused: a branch that is stopped by its budget brings what it has.
        self._branch.capture(moved(ctx.messages, self._home))
        model = request_context.model
        is_first = self._branch.cost_tracker.requests == 0
        guess = expected(self._price, model, request_context.messages) if is_first else None
        with self._branch.request(guess, is_priced=is_priced(self._price, model)) as meter:
            if self._tells_edits:
                await self._branch.mark_own_edits()
            response: ModelResponse = await handler(request_context)
            meter.used(used(self._price, model, response))
        goes_on = any(isinstance(part, ToolCallPart) for part in response.parts)
        if self._tells_edits and goes_on:
            # What has changed while the model answered is not the run's own work.
            edits = describe_edits(await self._branch.edits_of_others())
            if edits:
                ctx.enqueue(edits)
        return response

    async def handle_deferred_tool_calls(
        self,
        ctx: RunContext[Any],  # noqa: ARG002
        *,
        requests: DeferredToolRequests,
    ) -> DeferredToolResults | None:
        results = DeferredToolResults()
        for call in requests.approvals:
            answer = await self._branch.ask(call.tool_name, call.args_as_json_str())
            is_approved = answer == "approve"
            results.approvals[call.tool_call_id] = is_approved or ToolDenied()
        return results if requests.approvals else None


@dataclass(frozen=True, kw_only=True)
class RunnerOptions:
    """How the runs of all branches of a fork are made."""

    price: Price = listed_price
    on_event: OnEvent | None = None
    model: Any = None
    """Of branches whose spec names none; None is the agent's."""
    toolsets: Sequence[Any] = ()
    """Added to those of the agent."""
    output_type: Any = None
    """In the place of the agent's."""
    tells_edits: bool = False
    """Whether the model is told which files of the branch others changed while it was answering.
    Background programs of the run count as others."""
    seen_at: Any = None
    """The path at which commands see the branch; by default that of the workspace."""


class AgentRunner:
    """Runs the agent in one branch, for all its turns."""

    can_pause = True

    def __init__(
        self,
        agent: Agent[Any, Any],
        branch: BranchRuntime,
        options: RunnerOptions | None = None,
        *,
        coordinator: ForkCoordinator | None = None,
    ) -> None:
        """`coordinator` is the branch's; without it the run itself cannot fork."""
        self._coordinator = coordinator
        self._agent = agent
        self._branch = branch
        self._options = options or RunnerOptions()
        self._run: AgentRun[Any, Any] | None = None
        self._untold: list[str] = []
        self._sandbox: BranchSandbox | None = None
        self._deps = branch_deps(branch.deps, branch.isolation)

    async def run(self, prompt: str, history: History) -> RunOutcome:
        branch, spec = self._branch, self._branch.spec
        home = workspace_of(history or [])
        tokens = current_branch.set(branch), current_coordinator.set(self._coordinator)
        try:
            async with self._agent.iter(
                prompt,
                message_history=history or None,
                deps=self._deps,
                model=spec.model or self._options.model,
                instructions=spec.extra_instructions,
                output_type=self._options.output_type,
                usage_limits=UsageLimits(request_limit=None),  # the branch has its own budget
                toolsets=self._options.toolsets or None,
                capabilities=[
                    Meter(branch, self._options.price, home, tells_edits=self._options.tells_edits)
                ],
                workspace=self._workspace(),
            ) as run:
                self._run = run
                for text in self._untold:
                    run.enqueue(text)
                self._untold.clear()
                await self._follow(run)
        finally:
            self._run = None
            current_branch.reset(tokens[0])
            current_coordinator.reset(tokens[1])
        result = run.result
        if result is None:
            raise ForkStateError(f"the run of branch {branch.spec.label!r} ended without a result")
        messages = moved(result.all_messages(), home)
        return RunOutcome(
            history=messages,
            output=result.output,
            final_message=str(result.output) if result.output is not None else last_text(messages),
        )

    async def _follow(self, run: AgentRun[Any, Any]) -> None:
        tell = self._options.on_event
        async for node in run:
            if Agent.is_model_request_node(node):
                await self._branch.pause.over()  # includes messages to the run meanwhile
            if tell is not None and (
                Agent.is_model_request_node(node) or Agent.is_call_tools_node(node)
            ):
                async with node.stream(run.ctx) as stream:
                    events: AsyncIterable[Any] = stream
                    async for event in events:
                        tell(self._branch, event)

    def steer(self, text: str) -> None:
        """Puts it into the conversation before the next request; before the run's first one it is
        kept for that."""
        if self._run is None:
            self._untold.append(text)
        else:
            self._run.enqueue(text)

    async def stop(self) -> None:
        """Kills what the runs have started in their sandbox. A later run gets a new one."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await run_in_thread(sandbox.close)

    def _workspace(self) -> Any:
        branch = self._branch
        if branch.path is None:
            return None
        if self._sandbox is None:
            self._sandbox = BranchSandbox(
                branch.path,
                seen_at=self._options.seen_at or branch.seen_at,
                environment=branch.environment,
            )
        workspace = BranchWorkspace(self._sandbox)
        if branch.isolation.backend == "share_readonly":
            return ReadOnlyWorkspace(Workspace(workspace))
        return workspace


def agent_coordinator(
    agent: Agent[Any, Any],
    place: fs.Workspace | fs.Branch | None = None,
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
