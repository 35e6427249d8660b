"""pydantic-ai's agents as the voices of a chat. Needs the extra `agent`.

The agent is the user's own (`module:name`), or one of ours with a shell. The parent's run and those
of the branches are runs of the same agent, each in the sandbox of the directory it works in.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from pydantic_ai import Agent, DeferredToolRequests, DeferredToolResults, RunContext, ToolDenied
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.exceptions import UserError
from pydantic_ai.messages import (
    FunctionToolCallEvent,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
)
from pydantic_ai.models import infer_model

from branching.agent.branch_runtime import BranchRuntime
from branching.agent.checkpoint import InMemoryCheckpointStore
from branching.agent.coordinator import ForkCoordinator
from branching.agent.fork_log import ForkLog
from branching.agent.judge import Panel
from branching.agent.project_tests import BranchTester
from branching.agent.pydantic_ai import AgentRunner, MessagesCodec, RunnerOptions, model_judge
from branching.agent.pydantic_ai.runner import host_coordinator
from branching.agent.pydantic_ai.workspace import MovingWorkspace
from branching.agent.run_program import RunSettings, run_program
from branching.errors import BranchError, BranchingError
from branching.fs import Workspace
from branching.tui.chat.fork_registry import ForkRegistry, opened
from branching.tui.chat.protocols import Ask, Hear, Reply
from branching.tui.chat.session import ChatSession
from branching.tui.chat.settings import SettingsFile

INSTRUCTIONS = """\
You work on the files of a directory by its shell. Do what you are asked, check that it works, and
say in a few words what you did.
"""
ARGUMENTS_MAX = 200
"""Of a tool's arguments so many characters are shown."""
SHELL_OUTPUT_BYTES_MAX = 64 << 10
SHELL_SECONDS_MAX = 600.0
"""A line that takes longer is a program; it has a terminal of its own."""


def default_agent(model: Any) -> Agent[Any, Any]:
    """Returns an agent with a shell in the workspace."""
    agent: Agent[Any, Any] = Agent(model, instructions=INSTRUCTIONS)

    @agent.tool
    async def shell(ctx: RunContext[Any], command: str) -> str:
        """Run a command by the shell in the workspace; returns its output and exit code."""
        done = await ctx.workspace.run(command, shell=True)
        return f"{done.stdout}{done.stderr}[exit {done.exit_code}]"

    return agent


def load_agent(name: str) -> Agent[Any, Any]:
    """Returns the agent that `module:name` names; modules of the current directory count too.

    BranchingError for a name that leads to none.
    """
    module, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), attribute or "agent")
    except (ImportError, AttributeError, ValueError) as error:
        raise BranchingError(f"there is no agent {name!r}: {error}", hint="module:name") from error
    finally:
        sys.path.pop(0)
    if not isinstance(found, Agent):
        raise BranchingError(f"{name} is a {type(found).__name__}, not an agent of pydantic-ai")
    return found


def check_model(name: str) -> None:
    """Raises BranchingError if a model `provider:name` cannot be used, before anything is asked."""
    try:
        infer_model(name)
    except (ImportError, UserError, ValueError) as error:
        raise BranchingError(
            f"the model {name!r} cannot be used: {error}",
            hint="--model test is a demo that needs no provider",
        ) from error


async def open_session(
    space: Workspace,
    agent: Agent[Any, Any],
    *,
    model: str | None = None,
    judge_model: str | None = None,
    test_command: str | None = None,
    settings: SettingsFile | None = None,
) -> ChatSession:
    """Returns a chat with an agent that works in a workspace, and with the fork that an earlier one
    has left there. It is closed by `session.close()`.

    The judge's model is `judge_model`, by default the model of the agent.

    Raises:
        BranchingError: A model has no such provider, or its package or key is missing.
    """
    for name in (model, judge_model):
        if name is not None:
            check_model(name)
    judge_model = judge_model or model
    hooks = _EventHooks()
    options = RunnerOptions(on_event=hooks.on_event, model=model, seen_at=space.seen_at)

    def runner(branch: BranchRuntime) -> AgentRunner:
        return AgentRunner(agent, branch, options, coordinator=hooks.coordinator)

    kept = ForkRegistry(space)
    found = await opened(
        kept,
        agent=agent,
        runner=runner,
        codec=MessagesCodec(),
        place=space,
        checkpoint_store=InMemoryCheckpointStore(),
        judge=Panel(model_judge=lambda name: model_judge(judge_model or agent.model or name)),
        tester=BranchTester(test_command, seen_at=space.seen_at) if test_command else None,
    )
    coordinator = hooks.coordinator = found.coordinator
    for branch in coordinator.branches.values():
        branch.runner = runner(branch)  # the one it has was made before the coordinator was there
    session = ChatSession(
        coordinator,
        PydanticChatAgent(agent, coordinator, space, model),
        settings=settings or SettingsFile(max_branches=coordinator.max_branches),
        shell=Shell(coordinator, seen_at=space.seen_at),
        history=found.history or [],
        log=ForkLog(coordinator, space, "chat", is_behind=True).__enter__(),
        kept=kept,
    )
    for complaint in found.complaints:
        session.note(complaint, "error")
    hooks.session = session
    return session


class PydanticChatAgent:
    """The parent's runs."""

    def __init__(
        self,
        agent: Agent[Any, Any],
        coordinator: ForkCoordinator,
        space: Workspace,
        model: str | None,
    ) -> None:
        self._agent = agent
        self._coordinator = coordinator
        self._space = space
        self._model = model
        own = agent.model
        self.name = model or getattr(own, "model_name", None) or str(own or "no model")

    async def say(self, prompt: str, history: Any, hear: Hear, ask: Ask) -> Reply:
        """See `Voice.say`."""
        workspace = MovingWorkspace(
            lambda: self._coordinator.writable_path() or self._space.path,
            seen_at=self._space.seen_at,
        )
        hosting = host_coordinator.set((self._agent, self._coordinator))
        try:
            async with self._agent.iter(
                prompt,
                message_history=history or None,
                model=self._model,
                workspace=workspace,
                capabilities=[_Asking(ask)],
            ) as run:
                async for node in run:
                    if Agent.is_model_request_node(node) or Agent.is_call_tools_node(node):
                        async with node.stream(run.ctx) as events:
                            async for event in events:
                                if piece := said_in(event):
                                    hear(piece)
            result = run.result
            assert result is not None, "a run that was followed to its end has a result"
            return Reply(history=result.all_messages(), text=str(result.output))
        finally:
            host_coordinator.reset(hosting)
            workspace.close()
            await self._coordinator.land()


class _Asking(AbstractCapability[Any]):
    """Asks the person about tools that need an approval."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def handle_deferred_tool_calls(
        self,
        ctx: RunContext[Any],  # noqa: ARG002
        *,
        requests: DeferredToolRequests,
    ) -> DeferredToolResults | None:
        results = DeferredToolResults()
        for call in requests.approvals:
            answer = await self._ask(call.tool_name, call.args_as_json_str())
            results.approvals[call.tool_call_id] = answer == "approve" or ToolDenied()
        return results if requests.approvals else None


class _EventHooks:
    """Hands what branches say to the session, which is made after them, as their coordinator is."""

    session: ChatSession
    coordinator: ForkCoordinator | None = None

    def on_event(self, branch: BranchRuntime, event: Any) -> None:
        if isinstance(event, FunctionToolCallEvent):
            call = event.part
            text = f"{call.tool_name} {call.args_as_json_str()}"[:ARGUMENTS_MAX]
            self.session.heard_tool(branch.id, text)
        elif piece := said_in(event):
            self.session.heard(branch.id, piece)


def said_in(event: Any) -> str:
    """Returns the piece of text that an event of a run brings; "" for another event."""
    if isinstance(event, PartStartEvent) and isinstance(event.part, TextPart):
        return event.part.content
    if isinstance(event, PartDeltaEvent) and isinstance(event.delta, TextPartDelta):
        return event.delta.content_delta
    return ""


class Shell:
    """`!command`: runs a shell command where the open tab works, in the sandbox of that place."""

    def __init__(self, coordinator: ForkCoordinator, *, seen_at: Path | None) -> None:
        self._coordinator = coordinator
        self._seen_at = seen_at

    async def __call__(self, line: str, branch: BranchRuntime | None) -> str:
        """Runs it; returns what it printed, and its exit code unless that is 0."""
        directory = self._coordinator.writable_path() if branch is None else branch.path
        if directory is None:
            raise BranchError("this chat has no files")
        printed = bytearray()

        def take(arrived: bytes) -> None:
            printed.extend(arrived[: SHELL_OUTPUT_BYTES_MAX - len(printed)])

        environment = {} if branch is None else branch.environment
        place = RunSettings(directory=directory, seen_at=self._seen_at, environment=environment)
        ended = await run_program(line, place, stdout=take, stderr=take, timeout=SHELL_SECONDS_MAX)
        if branch is None:
            await self._coordinator.land()
        text = printed.decode("utf-8", "replace")
        if len(printed) >= SHELL_OUTPUT_BYTES_MAX:
            text += f"\n[output truncated at {SHELL_OUTPUT_BYTES_MAX} bytes]\n"
        return text if ended.success else f"{text}[{ended.reason}]"
