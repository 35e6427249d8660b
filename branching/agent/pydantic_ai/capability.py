"""Live forking of an agent's runs, as a capability of pydantic-ai.

    agent = Agent(model, deps_type=..., capabilities=[LiveForkCapability(place=workspace)])

Each run of the agent gets a coordinator of its own, made when it forks. What happens to a run:

    fork_run         the branches start from the conversation up to this call; the parent's files
                     are frozen, and it goes on in a branch of its own without noticing
    merge_or_select  the winner's files land where the parent works, and its conversation takes the
                     place of the parent's, at the parent's next request: `result.all_messages()`
                     is the winner's history with what came after the merge
    open branches    of others, or of another process, make the directory read-only: the run then
                     works in a branch of its own, which is committed at its end. Conflicts with
                     changes of others are a warning, and the branch is kept
    end of the run   a fork that is still open stays, with its branches; the next run of the
                     conversation finds it, and so does `coordinator_of(deps)`. A run of another
                     conversation finds it too, works beside it, and can end it: it then gets the
                     winner's files, and keeps its own conversation
    exception        a run that raises or is cancelled ends its fork: the branches are dropped, what
                     they changed is kept as patches, and the parent's files land. With a
                     durable `store` the branches are stopped, and the fork can be resumed

Without `place` the branches share the files of their agent: conversations and budgets fork, files
do not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic_ai import RunContext
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    UserPromptPart,
    WorkspaceRef,
)
from pydantic_ai.models import ModelRequestContext
from pydantic_ai.toolsets import FunctionToolset
from pydantic_ai.workspaces import WorkspaceBackend

from branching.agent.branch_runtime import BranchRuntime, Tester
from branching.agent.budget import UnknownPrice
from branching.agent.confidence import Confidence
from branching.agent.coordinator import ForkCoordinator
from branching.agent.fork_tools import INSTRUCTIONS, SEQUENTIAL, ForkTools
from branching.agent.judge import Panel, SingleJudge
from branching.agent.project_tests import TIMEOUT_SECONDS, BranchTester
from branching.agent.protocols import CheckpointStore, ForkStateStore, Judge
from branching.agent.pydantic_ai.codec import MessagesCodec, moved, workspace_of
from branching.agent.pydantic_ai.deps import COORDINATOR, keep_coordinator
from branching.agent.pydantic_ai.judge import model_judge
from branching.agent.pydantic_ai.pricing import Price, listed_price
from branching.agent.pydantic_ai.runner import (
    AgentRunner,
    OnEvent,
    RunnerOptions,
    current_branch,
    current_coordinator,
    host_coordinator,
)
from branching.agent.pydantic_ai.workspace import PROVIDER, MovingWorkspace
from branching.agent.types import MergeResult
from branching.fs import Branch, Workspace


@dataclass
class LiveForkCapability(AbstractCapability[Any]):
    """Lets an agent fork its runs. The fields are the settings; see the module for the rest."""

    max_branches: int = 10
    max_depth: int = 2
    """How many forks deep a branch may be that forks: 2 is a fork within a fork."""
    store: ForkStateStore | None = None
    """Where forks are kept; by default in memory."""
    keep_artifacts: bool = False
    """Keeps the files of the branches in `.pydantic-deep/forks` in the workspace's directory."""
    test_command: str | Sequence[str] | None = None
    """Run in each branch before a judge is asked; "auto" finds the project's own."""
    test_timeout_s: float = TIMEOUT_SECONDS
    place: Workspace | Branch | None = field(default=None, kw_only=True)
    """Where the agent works. None: the branches share the files."""
    judge: SingleJudge | Judge | None = field(default=None, kw_only=True)
    """A callable `judge(case)`, or a whole Panel; by default the strategy's models are asked."""
    confidence: Confidence | None = field(default=None, kw_only=True)
    price: Price = field(default=listed_price, kw_only=True)
    unknown_price: UnknownPrice = field(default="refuse", kw_only=True)
    checkpoint_store: CheckpointStore | None = field(default=None, kw_only=True)
    on_branch_event: OnEvent | None = field(default=None, kw_only=True)
    tells_edits: bool = field(default=False, kw_only=True)
    """Whether a branch's model is told which files others changed while it was answering."""
    runner: Callable[[BranchRuntime], Any] | None = field(default=None, kw_only=True)
    """Creates the runner of a branch. Default: AgentRunner."""

    latest_messages: list[ModelMessage] = field(default_factory=list, init=False)
    """A copy of the parent's conversation as it was at its last request."""
    coordinator: ForkCoordinator | None = field(default=None, init=False)
    """Of the run that this instance belongs to."""

    def __post_init__(self) -> None:
        self._open: dict[str, ForkCoordinator] = {}
        self._runs: dict[str, LiveForkCapability] = {}
        self.branch: BranchRuntime | None = None
        self._merged: MergeResult | None = None
        self._is_guest = False
        """The fork is that of another conversation."""
        self._is_hosted = False
        """The coordinator is that of the program around the run."""
        self._codec = MessagesCodec()

    async def for_run(self, ctx: RunContext[Any]) -> AbstractCapability[Any]:
        """Returns the instance for one run.

        Its coordinator is new, or the one whose fork was left open in this conversation.
        """
        own = replace(self)
        own._open, own._runs = self._open, self._runs
        own.branch = current_branch.get()
        if own.branch is not None:
            own.coordinator = own._nested(ctx, own.branch, current_coordinator.get())
        elif (host := host_coordinator.get()) is not None and host[0] is ctx.agent:
            own.coordinator, own._is_hosted = host[1], True
            keep_coordinator(ctx.deps, own.coordinator)
        else:
            kept = coordinator_of(ctx.deps) or self._open.get(ctx.conversation_id or "")
            if kept is None or kept.is_resolved:
                kept = next((each for each in self._open.values() if not each.is_resolved), None)
                own._is_guest = kept is not None
            if kept is not None:
                own.coordinator = kept
            else:
                own.coordinator = own._new(ctx)
                keep_coordinator(ctx.deps, own.coordinator)
            if ctx.run_id is not None:
                self._runs[ctx.run_id] = own
        if own.coordinator is not None:
            # Who holds the coordinator finds the instance that it works for now.
            vars(own.coordinator)["capability"] = own
        return own

    def get_instructions(self) -> str:
        return INSTRUCTIONS

    def get_toolset(self) -> FunctionToolset[Any]:
        toolset: FunctionToolset[Any] = FunctionToolset(id="live-fork")
        for tool in ForkTools(self).functions():
            name = tool.__name__
            toolset.add_function(tool, takes_ctx=False, name=name, sequential=name in SEQUENTIAL)
        return toolset

    def get_workspace(
        self, ctx: RunContext[Any], *, ref: WorkspaceRef | None
    ) -> WorkspaceBackend | None:
        """Returns the place as the run's workspace, unless it continues in another provider's.

        A conversation that was in a workspace of ours goes on in `place`, whatever path its
        messages name: the directory may be mounted elsewhere now.
        """
        if self.place is None or (ref is not None and ref.provider != PROVIDER):
            return None
        if (host := host_coordinator.get()) is not None and host[0] is ctx.agent:
            return None  # the program around the run says where the agent works
        run_id, place = ctx.run_id, self.place

        def where() -> Path:
            run = self._runs.get(run_id or "")
            moved_to = run.coordinator.writable_path() if run and run.coordinator else None
            return moved_to or place.path

        return MovingWorkspace(where, seen_at=self._seen_at(), ref=ref)

    async def wrap_run(self, ctx: RunContext[Any], *, handler: Any) -> Any:
        try:
            return await handler()
        except BaseException as error:
            if self._owns_coordinator and self.coordinator is not None:
                await self.coordinator.interrupt(error)
            raise
        finally:
            for key in [key for key, each in self._open.items() if each.is_resolved]:
                del self._open[key]
            if self._owns_coordinator and self.coordinator is not None and ctx.conversation_id:
                if self.coordinator.is_resolved:
                    if self.coordinator.fork_id is None:
                        await self.coordinator.aclose()  # it has never forked
                else:
                    self._open[ctx.conversation_id] = self.coordinator
            workspace = getattr(ctx.workspace, "backend", None)
            if isinstance(workspace, MovingWorkspace):
                workspace.close()
            self._runs.pop(ctx.run_id or "", None)
            if self.coordinator is not None and self.branch is None and not self._is_hosted:
                await self.coordinator.land()

    @property
    def _owns_coordinator(self) -> bool:
        return self.branch is None and not self._is_guest and not self._is_hosted

    async def before_model_request(
        self, ctx: RunContext[Any], request_context: ModelRequestContext
    ) -> ModelRequestContext:
        if self._merged is not None:
            request_context = self._adopted(ctx, request_context, self._merged)
            self._merged = None
        # Of a branch the branch's meter keeps the conversation, too.
        self.latest_messages = list(ctx.messages)
        return request_context

    # What the tools need of the run.

    def history(self) -> list[Any]:
        """The conversation up to the request that is being answered."""
        return self._codec.copy(self.latest_messages)

    def adopt(self, merged: MergeResult) -> None:
        """Replaces the run's conversation by the winner's, from its next request on."""
        if not self._is_guest:
            self._merged = merged

    def _adopted(
        self, ctx: RunContext[Any], request: ModelRequestContext, merged: MergeResult
    ) -> ModelRequestContext:
        home = workspace_of(ctx.messages)
        given: Any = merged.history_after_merge
        history = moved(given or [], home)
        shared = sum(1 for _ in takewhile(_are_equal, zip(history, ctx.messages, strict=False)))
        for message in history[shared:]:
            if isinstance(message, ModelResponse):
                ctx.usage.incr(message.usage)  # what the winner used is the parent's
        notice = ModelRequest(parts=[UserPromptPart(content=merged.notice)])
        ctx.messages[:] = [*history, notice]
        return replace(request, messages=list(ctx.messages))

    def _new(self, ctx: RunContext[Any]) -> ForkCoordinator:
        return ForkCoordinator(
            ctx.agent,
            ctx.deps,
            runner=self._runner_factory(ctx),
            codec=self._codec,
            place=self.place,
            goal=_goal(ctx),
            **self._options(),
        )

    def _nested(
        self, ctx: RunContext[Any], branch: BranchRuntime, outer: ForkCoordinator | None
    ) -> ForkCoordinator | None:
        if isinstance(branch.inner, ForkCoordinator):
            return branch.inner
        if outer is None:
            return None
        return outer.nested(
            branch.id,
            runner=self._runner_factory(ctx),
            goal=branch.spec.steer,
            **self._options(),
        )

    def _options(self) -> dict[str, Any]:
        return {
            "max_branches": self.max_branches,
            "max_depth": self.max_depth,
            "store": self.store,
            "checkpoint_store": self.checkpoint_store,
            "unknown_price": self.unknown_price,
            "keep_artifacts": self.keep_artifacts,
            "judge": self._judge(),
            "tester": self._tester(),
        }

    def _runner_factory(self, ctx: RunContext[Any]) -> Callable[[BranchRuntime], Any]:
        if self.runner is not None:
            return self.runner
        options = RunnerOptions(
            price=self.price,
            on_event=self.on_branch_event,
            model=ctx.model,
            seen_at=self._seen_at(),
            tells_edits=self.tells_edits,
        )
        agent: Any = ctx.agent
        return lambda branch: AgentRunner(agent, branch, options, coordinator=self.coordinator)

    def _seen_at(self) -> Path | None:
        return getattr(self.place, "seen_at", None)

    def _judge(self) -> Judge:
        if isinstance(self.judge, Panel):
            return self.judge
        single: Any = self.judge
        return Panel(
            single,
            model_judge=lambda name: model_judge(name, price=self.price),
            confidence=self.confidence,
        )

    def _tester(self) -> Tester | None:
        if self.test_command is None:
            return None
        return BranchTester(self.test_command, timeout=self.test_timeout_s, seen_at=self._seen_at())


def create_fork_toolset(capability: LiveForkCapability | None = None) -> FunctionToolset[Any]:
    """Returns the seven tools alone. They answer that forking is not enabled unless they are those
    of a run: use the capability, which brings them."""
    return (capability or LiveForkCapability()).get_toolset()


def coordinator_of(deps: Any) -> ForkCoordinator | None:
    """Returns the coordinator that a run left with its dependencies (`deps.fork_coordinator`)."""
    found = getattr(deps, COORDINATOR, None)
    return found if isinstance(found, ForkCoordinator) else None


def forking(setting: bool | LiveForkCapability = False) -> list[LiveForkCapability]:
    """Returns the capabilities for a setting: False is none, True the defaults.

    `Agent(model, capabilities=[*forking(True)])`. Raises TypeError for anything else.
    """
    if isinstance(setting, LiveForkCapability):
        return [setting]
    if not isinstance(setting, bool):
        raise TypeError(f"forking must be a bool or a LiveForkCapability, not {setting!r}")
    return [LiveForkCapability()] if setting else []


def _are_equal(pair: tuple[ModelMessage, ModelMessage]) -> bool:
    return pair[0] == pair[1]


def _goal(ctx: RunContext[Any]) -> str:
    prompt = ctx.prompt
    if prompt is None or isinstance(prompt, str):
        return prompt or ""
    return os.linesep.join(str(part) for part in prompt)
