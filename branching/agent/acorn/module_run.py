"""One run of a module, and the branches that it sends off."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError
from pydantic_ai import Agent, RunContext, Tool, ToolOutput
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    RetryPromptPart,
    TextPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models import ModelRequestContext
from pydantic_ai.usage import UsageLimits

from branching.agent.acorn.errors import BranchError
from branching.agent.acorn.result_text import (
    MERGES,
    Merge,
    as_summary,
    as_xml,
    listed,
    summarized,
)
from branching.agent.acorn.tools import (
    BRANCH,
    CALL_PARENT,
    FINISH,
    called,
    described,
    own_tools,
)
from branching.agent.branch_runtime import BranchRuntime
from branching.agent.checkpoint import InMemoryCheckpointStore
from branching.agent.coordinator import ForkCoordinator
from branching.agent.pydantic_ai.codec import MessagesCodec
from branching.agent.pydantic_ai.runner import AgentRunner, RunnerOptions
from branching.agent.types import BranchIsolation, BranchSpec, Budget, MergeResult
from branching.errors import BranchingError

if TYPE_CHECKING:
    from branching.agent.acorn.module import Module

MAX_DEPTH = 10
"""Branches of branches; one or two levels are what models cope with."""
_CODEC = MessagesCodec()


class Finished(BaseModel):
    """How a module without a `final_output` may end."""


class Step:
    """One step of a run: an answer of the model, and what the tools returned that it called.

    It has the attributes of the answer, pydantic-ai's ModelResponse, too.
    """

    def __init__(
        self, response: ModelResponse, tool_results: Sequence[ToolReturnPart | RetryPromptPart]
    ) -> None:
        self.response = response
        self.tool_results = list(tool_results)
        """In the order of the calls; a call that failed has a RetryPromptPart."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.response, name)


class Ear(AbstractCapability[Any]):
    """Records the conversation of a module's run, and reports each step.

    A step is reported when its tools have run: before the next request, or at the end of the run.
    What `on_step` appends to the history is in the next request.
    """

    def __init__(self, run: ModuleRun) -> None:
        self._run = run
        self._response: ModelResponse | None = None
        """The last answer, if its step is not reported yet."""

    async def before_model_request(
        self, ctx: RunContext[Any], request_context: ModelRequestContext
    ) -> ModelRequestContext:
        run = self._run
        run.model = ctx.model
        added = run.take_added()
        run.messages = [*ctx.messages, *added]
        if self._response is not None:
            told: list[str] = []
            run.tell = told.append  # a message that is enqueued now comes after this request
            await self._report(ctx.messages)
            added += [_user(text) for text in told] + run.take_added()
        run.tell = ctx.enqueue
        if not added:
            return request_context
        ctx.messages.extend(added)
        run.messages = list(ctx.messages)
        return replace(request_context, messages=list(ctx.messages))

    async def after_model_request(
        self,
        ctx: RunContext[Any],
        *,
        request_context: ModelRequestContext,  # noqa: ARG002
        response: ModelResponse,
    ) -> ModelResponse:
        self._response = response
        if all(call.tool_name == FINISH for call in response.tool_calls):
            await self._report(ctx.messages)  # no tool runs
        return response

    async def wrap_run(self, ctx: RunContext[Any], *, handler: Any) -> Any:
        result = await handler()
        if self._response is not None:  # tools were called beside the end of the run
            await self._report(ctx.messages)
        return result

    async def _report(self, messages: Sequence[ModelMessage]) -> None:
        response, self._response = self._response, None
        assert response is not None, "a step is reported once"
        ids = [call.tool_call_id for call in response.tool_calls]
        parts = [part for message in messages for part in message.parts]
        results = {
            part.tool_call_id: part
            for part in parts
            if isinstance(part, (ToolReturnPart, RetryPromptPart)) and part.tool_call_id in ids
        }
        step = Step(response, [results[each] for each in ids if each in results])
        on_step = self._run.module.on_step
        if inspect.iscoroutinefunction(on_step):
            await on_step(step)
        else:
            # Not `run_in_thread`: a cancelled run does not wait for the branch of a callback.
            await asyncio.to_thread(on_step, step)


class ModuleRun:
    """One run of one module."""

    def __init__(self, module: Module, parent: ModuleRun | None) -> None:
        self.module = module
        self.parent = parent
        self._messages: list[Any] = []
        self._shown: list[Any] | None = None
        self.model: Any = None
        self.tell: Callable[[str], Any] = lambda _: None
        self.runtime: BranchRuntime | None = None
        """The branch that this run is; None for the first of all."""
        self.coordinator: ForkCoordinator | None = None
        """That the branch belongs to."""
        self.loop = asyncio.get_running_loop()
        self._files = asyncio.Lock()  # one branch after another where they change files

    @property
    def place(self) -> Any:
        """Where it works: its own workspace or branch, or that of the nearest run above."""
        if self.runtime is not None and self.runtime.branch is not None:
            return self.runtime.branch
        return self.module.place if self.parent is None else self.parent.place

    @property
    def path(self) -> Path | None:
        return None if self.place is None else Path(self.place.path)

    @property
    def messages(self) -> list[Any]:
        """The conversation as it was sent last: without the answer that is being acted on."""
        return self._messages

    @messages.setter
    def messages(self, messages: list[Any]) -> None:
        self._messages, self._shown = messages, None

    def history(self) -> list[Any]:
        return _CODEC.copy(self.messages)

    def shown_history(self) -> list[Any]:
        """Returns a copy of the conversation. What is appended to it becomes part of the next
        request."""
        if self._shown is None:
            self._shown = self.history()
        return self._shown

    def take_added(self) -> list[ModelMessage]:
        """Returns the messages that were appended to the shown history.

        Raises:
            TypeError: One is neither a message nor a text.
        """
        added = [] if self._shown is None else self._shown[len(self._messages) :]
        self._shown = None
        return [_message(each) for each in added]

    async def to_end(self, inputs: Mapping[str, Any]) -> Any:
        """Runs the first of all modules."""
        prompt = _prompt(type(self.module), inputs)
        limits = UsageLimits(request_limit=self.module.max_steps)
        result = await self.agent().run(prompt, usage_limits=limits)
        self.messages = result.all_messages()
        return None if isinstance(result.output, Finished) else result.output

    def agent(self) -> Agent[Any, Any]:
        """Returns the module as an agent of pydantic-ai."""
        module, kind = self.module, type(self.module)
        inherited = {} if self.parent is None else self.parent.inherited()
        tools = [
            Tool(function, takes_ctx=False, name=name)
            for name, function in {**inherited, **own_tools(module)}.items()
        ]
        if kind.branches:
            tools.append(self._branch_tool())
        if self.parent is not None:
            tools.append(self._parent_tool())
        output: Any = [ToolOutput(Finished, name=FINISH), str]
        if kind.final_output is not None:
            output = ToolOutput(kind.final_output, name=FINISH)
        settings: Any = None if kind.temperature is None else {"temperature": kind.temperature}
        return Agent(
            module.chosen_model,
            output_type=output,
            instructions=kind.system_prompt or kind.description() or None,
            tools=tools,
            model_settings=settings,
            capabilities=[Ear(self)],
        )

    def inherited(self) -> dict[str, Callable[..., Any]]:
        """Returns the tools that a branch of this run can call through it."""
        tools: dict[str, Callable[..., Any]] = {}
        if self.parent is not None and type(self.module).scope == "all":
            tools |= self.parent.inherited()
        return tools | own_tools(self.module)

    async def branch_of(
        self, kind: type[Module], merge: Merge, inputs: Mapping[str, Any]
    ) -> BaseModel | None:
        """Does what `Module.branch` says."""
        if merge not in MERGES:
            raise ValueError(f"merge must be one of {', '.join(MERGES)}, not {merge!r}")
        try:
            result, text = await self._branched(kind, merge, inputs)
        except (BranchingError, ValidationError, RuntimeError) as error:
            if isinstance(error, BranchError):
                raise
            raise BranchError(f"branch {kind.__name__} failed: {error}") from error
        self.tell(f"[Branch Result] {kind.__name__}\n{text}")
        return result

    async def _branched(
        self, kind: type[Module], merge: Merge, inputs: Mapping[str, Any]
    ) -> tuple[BaseModel | None, str]:
        prompt = _prompt(kind, inputs)
        if kind.workspace == "branch" and self.path is not None:
            async with self._files:
                return await self._forked(kind, merge, prompt)
        return await self._forked(kind, merge, prompt)

    async def _forked(
        self, kind: type[Module], merge: Merge, prompt: str
    ) -> tuple[BaseModel | None, str]:
        """Runs a fork of one, and merges it."""
        child = self._child(kind)
        coordinator = self._coordinator(kind, child)
        usd = self.module.budget_usd
        steps = Budget(requests=kind.max_steps)
        spec = BranchSpec(kind.__name__, prompt, budget_usd=usd, budget=steps)
        try:
            await coordinator.fork(
                [spec], parent_history=self.history(), isolation=BranchIsolation()
            )
            (branch,) = coordinator.branches.values()
            assert branch.task is not None, "it was started"
            await asyncio.wait({branch.task})
            if branch.status.state != "done":
                raise BranchError(
                    f"branch {kind.__name__}: {branch.status.state}: {branch.status.error}"
                )
            result = branch.output if isinstance(branch.output, BaseModel) else None
            result = None if isinstance(result, Finished) else result
            text = await self._told(child, branch, merge, result)
            merged = await coordinator.merge_or_select(f"pick:{branch.id}")
        finally:
            await coordinator.aclose()
        return result, text + _trouble(merged)

    async def _told(
        self, child: ModuleRun, branch: BranchRuntime, merge: Merge, result: BaseModel | None
    ) -> str:
        if merge == "end_result" and result is not None:
            return as_xml(result)
        model = child.model or child.module.chosen_model or self.model
        return as_summary(await summarized(model, branch.history), result)

    def _child(self, kind: type[Module]) -> ModuleRun:
        module = kind(
            price=self.module.price,
            budget_usd=self.module.budget_usd,
            unknown_price=self.module.unknown_price,
        )
        return module._begun(self)

    def _coordinator(self, kind: type[Module], child: ModuleRun) -> ForkCoordinator:
        place = self.place if kind.workspace == "branch" else None
        options = RunnerOptions(price=self.module.price, model=child.module.chosen_model)
        if options.model is None:
            options = RunnerOptions(price=self.module.price, model=self.model)

        def runner(branch: BranchRuntime) -> AgentRunner:
            child.runtime, child.coordinator = branch, coordinator
            return AgentRunner(child.agent(), branch, options, coordinator=coordinator)

        coordinator = ForkCoordinator(
            runner=runner,
            codec=_CODEC,
            place=place,
            depth=0 if self.coordinator is None else self.coordinator.depth + 1,
            max_depth=MAX_DEPTH,
            outer=self.runtime,
            checkpoint_store=_NO_CHECKPOINTS,
            unknown_price=self.module.unknown_price,
        )
        return coordinator

    def _branch_tool(self) -> Tool[Any]:
        kinds = {kind.__name__: kind for kind in type(self.module).branches}

        async def branch(
            name: str | None = None, merge: Merge = "end_result", **inputs: Any
        ) -> str:
            if name is None:
                return listed(list(kinds.values()))
            if name not in kinds:
                return f"Error: there is no branch {name!r}; there are {', '.join(kinds)}"
            if merge not in MERGES:
                return f"Error: merge must be one of {', '.join(MERGES)}, not {merge!r}"
            try:
                return (await self._branched(kinds[name], merge, inputs))[1]
            except Exception as error:  # the parent continues after any failure
                return f"Error: {error}"

        made: Tool[Any] = Tool.from_schema(
            branch,
            name=BRANCH,
            description="Start a branch and wait for its result. Without a name, list the "
            "branches and their inputs; give inputs beside name and merge.",
            json_schema={
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "merge": {"type": "string", "enum": list(MERGES)},
                },
                "additionalProperties": True,
            },
        )
        return made

    def _parent_tool(self) -> Tool[Any]:
        assert self.parent is not None, "only a branch has it"
        tools = self.parent.inherited()

        async def call_parent_tool(name: str | None = None, **arguments: Any) -> str:
            if name is None:
                return described(tools)
            if name not in tools:
                return f"Error: the parent has no tool {name!r}; it has {', '.join(tools)}"
            try:
                return await called(tools[name], arguments)
            except Exception as error:
                return f"Error: {error}"

        made: Tool[Any] = Tool.from_schema(
            call_parent_tool,
            name=CALL_PARENT,
            description="Call a tool of your parent; give its arguments beside its name. Without "
            "a name, list the tools.",
            json_schema={
                "type": "object",
                "properties": {"name": {"type": "string"}},
                "additionalProperties": True,
            },
        )
        return made


_NO_CHECKPOINTS = InMemoryCheckpointStore(max_checkpoints=0)
"""A branch of this kind is not rewound: its parent waits for it."""


def _user(text: str) -> ModelRequest:
    return ModelRequest(parts=[UserPromptPart(content=text)])


def _message(added: Any) -> ModelMessage:
    """Returns a message that was appended to the history: a message of pydantic-ai, a text of the
    user, or a dict with role and content."""
    if isinstance(added, (ModelRequest, ModelResponse)):
        return added
    if isinstance(added, str):
        return _user(added)
    if isinstance(added, Mapping) and isinstance(text := added.get("content"), str):
        if added.get("role") == "assistant":
            return ModelResponse(parts=[TextPart(content=text)])
        if added.get("role") in ("user", "system"):
            return _user(text)
    raise TypeError(
        "self.history takes messages of pydantic-ai, texts, and dicts with role and content, "
        f"not {added!r}"
    )


def _prompt(kind: type[Module], inputs: Mapping[str, Any]) -> str:
    """Returns what a run begins with. ValidationError for inputs that do not fit."""
    if kind.initial_input is None:
        if inputs:
            raise ValueError(f"{kind.__name__} takes no input, and was given {', '.join(inputs)}")
        return f"Go on as {kind.__name__}: {kind.description()}"
    return kind.initial_input(**inputs).model_dump_json()


def _trouble(merged: MergeResult) -> str:
    lines = [
        f"not merged, it was also changed in the workspace: {path}" for path in merged.conflicts
    ]
    lines += [f"not merged: {error.path}: {error.message}" for error in merged.errors]
    return "".join(f"\n{line}" for line in lines)
