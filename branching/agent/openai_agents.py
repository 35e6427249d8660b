"""Agents of the OpenAI Agents SDK that fork. Needs the extra `openai-agents`.

    async with LiveFork(agent, place=workspace) as forks:
        result = await forks.run("Try it in two ways, and keep the better one.")
        again = await forks.run([*result.to_input_list(), {"role": "user", "content": "Go on."}])

`forks.agent` is the agent with the fork tools and `run_command`. Tools of your own call
`forks.files.run(...)`, which works in the branch of the run that calls. `merge_or_select` makes the
winner's conversation the parent's, at the parent's next request: `result.to_input_list()` is the
winner's items with what came after the merge, and a session is rewritten to them.
`forks.run_streamed(...)` streams the events of a run; `on_branch_event` receives those of branches.

A conversation that OpenAI's servers keep cannot be forked, because its items are not here.
"""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

try:
    from agents import (
        Agent,
        AgentOutputSchema,
        FunctionTool,
        ModelResponse,
        RunConfig,
        RunContextWrapper,
        RunHooks,
        Runner,
        RunResult,
        RunResultStreaming,
        StreamEvent,
        function_tool,
    )
    from agents import Usage as AgentsUsage
    from agents.run import CallModelData, ModelInputData
except ImportError as error:
    raise ImportError(
        "branching.agent.openai_agents needs its extra: "
        'pip install ".[openai-agents]" in the source tree'
    ) from error

from branching.agent.branch_runtime import BranchRuntime
from branching.agent.budget import Reservation
from branching.agent.cost_estimate import TokenPrice
from branching.agent.errors import ForkStateError
from branching.agent.fork_tools import INSTRUCTIONS
from branching.agent.json_codec import JsonCodec, preview_of
from branching.agent.judge import JudgeCase, Opinion, SingleJudge
from branching.agent.judge_verdict import JudgeVerdict
from branching.agent.live_fork import ForkingRun, Price, as_text, cost
from branching.agent.live_fork import LiveFork as _LiveFork
from branching.agent.protocols import History, RunOutcome, ToolCall
from branching.agent.types import Usage

Items = list[Any]
"""Items of a conversation, as `result.to_input_list()` returns them."""
AnyResult = RunResult | RunResultStreaming
OnBranchEvent = Callable[[BranchRuntime, StreamEvent], None]
"""Receives an event of a branch's run."""
ON_SERVER = ("previous_response_id", "auto_previous_response_id", "conversation_id")
"""Options of a run whose conversation OpenAI's servers keep."""
VERDICT = AgentOutputSchema(JudgeVerdict, strict_json_schema=False)
"""What a judge answers; the reasons by branch id are no strict schema."""


class ItemsCodec(JsonCodec):
    """A list of input items, as the SDK sends them to a model."""

    def preview(self, history: History) -> str:
        return preview_of(_text(history[-1]) if history else "")

    def turns(self, history: History) -> int:
        """Counts the model's answers: what it says or calls without an answer between."""
        turns, is_model = 0, False
        for item in history:
            was_model, is_model = is_model, _is_of_model(item)
            turns += is_model and not was_model
        return turns

    def tool_calls(self, history: History) -> Sequence[ToolCall]:
        return [
            ToolCall(name=str(item.get("name")), arguments=str(item.get("arguments", "")))
            for item in history
            if item.get("type") == "function_call"
        ]


class LiveFork(_LiveFork):
    """One conversation of an agent that can fork itself. See the module."""

    def __init__(
        self,
        agent: Agent[Any],
        *,
        context: Any = None,
        run_config: RunConfig | None = None,
        on_branch_event: OnBranchEvent | None = None,
        **options: Any,
    ) -> None:
        """Prepares a conversation.

        Args:
            agent: The agent; it gets the tools in a clone, `self.agent`.
            context: The context object of all runs. Branches share it with the parent, unless it
                has a method `clone_for_branch(isolation)`.
            run_config: The settings of all runs.
            on_branch_event: Receives each branch and the events of its runs, which are streamed
                then: single tokens, too.
            options: Of the base: place, judge, price, and those of `ForkCoordinator`. Without a
                judge the agent's own model is asked.
        """
        options.setdefault("model_judge", lambda _: model_judge(agent.model, options.get("price")))
        super().__init__(codec=ItemsCodec(), deps=context, **options)
        self.agent: Agent[Any] = agent.clone(tools=[*agent.tools, *self.tools()])
        self._run_config = run_config or RunConfig()
        self._on_branch_event = on_branch_event

    def tools(self) -> list[FunctionTool]:
        """Returns the fork tools and `run_command`, for other agents of the same conversation."""
        return [
            function_tool(_in_text(function), strict_mode=False) for function in self.functions()
        ]

    async def run(self, prompt: str | Items, **options: Any) -> RunResult:
        """Runs the parent's agent, as `Runner.run` does.

        A run that raises or is cancelled ends its fork: it is aborted, or left to be resumed if
        its store is durable.

        Args:
            prompt: The prompt, or the items of the conversation so far with the prompt.
            options: Of `Runner.run`.

        Raises:
            ForkStateError: The conversation is kept by a server.
        """
        conversation, session = self._prepared(prompt, options), options.get("session")
        try:
            result = await Runner.run(self.agent, prompt, **options)
        except BaseException as error:
            await self.coordinator.interrupt(error)
            raise
        await conversation.finish(result, session)
        return result

    def run_streamed(self, prompt: str | Items, **options: Any) -> StreamedRun:
        """Starts a run of the parent's agent, as `Runner.run_streamed` does.

        The run ends, with its fork as `run` says, while its events are read.

        Args:
            prompt: The prompt, or the items of the conversation so far with the prompt.
            options: Of `Runner.run_streamed`.

        Raises:
            ForkStateError: The conversation is kept by a server.
        """
        conversation, session = self._prepared(prompt, options), options.get("session")
        result = Runner.run_streamed(self.agent, prompt, **options)
        return StreamedRun(self, result, conversation, session)

    def _prepared(self, prompt: str | Items, options: dict[str, Any]) -> _Conversation:
        """Returns the conversation of a run of the parent, and completes the options of the run."""
        if on_server := [name for name in ON_SERVER if options.get(name)]:
            raise ForkStateError(
                f"a conversation that the server keeps ({on_server[0]}) cannot be forked",
                hint="pass the items of the conversation, or a session",
            )
        if not self.coordinator.goal and isinstance(prompt, str):
            self.coordinator.goal = prompt
        conversation = _Conversation(self.parent)
        config: RunConfig = options.get("run_config") or self._run_config
        options["run_config"] = conversation.of_run(config)
        options.setdefault("context", self.coordinator.parent_deps)
        return conversation

    async def run_branch(self, run: ForkingRun, prompt: str, history: History) -> RunOutcome:
        branch = run.branch
        assert branch is not None
        config = self._run_config
        if branch.spec.model is not None:
            config = replace(config, model=branch.spec.model)
        conversation = _Conversation(run)
        config = conversation.of_run(config)
        given: Any = [*(history or []), _said(prompt)]
        try:
            while True:
                options: dict[str, Any] = {
                    "context": run.deps,
                    "max_turns": None,  # the branch has a budget
                    "hooks": conversation,
                    "run_config": config,
                }
                result: AnyResult
                if (on_event := self._on_branch_event) is None:
                    result = await Runner.run(self.agent, given, **options)
                else:
                    result = streamed = Runner.run_streamed(self.agent, given, **options)
                    try:
                        async for event in streamed.stream_events():
                            on_event(branch, event)
                    finally:
                        streamed.cancel()  # nothing, if it has ended
                if not result.interruptions:
                    break
                given = result.to_state()
                for asked in result.interruptions:
                    answer = await branch.ask(asked.name or "tool", asked.arguments or "")
                    decide = given.approve if answer == "approve" else given.reject
                    decide(asked)
        finally:
            conversation.settle(Usage())
        items = conversation.items(result.to_input_list())
        return RunOutcome(
            history=items,
            output=result.final_output,
            final_message="" if result.final_output is None else str(result.final_output),
        )


class StreamedRun:
    """A run of the parent whose events are streamed. Other attributes are those of its result."""

    def __init__(
        self,
        forks: LiveFork,
        result: RunResultStreaming,
        conversation: _Conversation,
        session: Any,
    ) -> None:
        self.result = result
        """The result, complete when all events were read."""
        self._forks = forks
        self._conversation = conversation
        self._session = session

    async def stream_events(self) -> AsyncIterator[StreamEvent]:
        """Yields the events of the run.

        If reading ends early, by an exception or because the iterator is closed, the run is
        cancelled and its fork ends.
        """
        try:
            async for event in self.result.stream_events():
                yield event
        except BaseException as error:
            self.result.cancel()
            await self._forks.coordinator.interrupt(error)
            raise
        await self._conversation.finish(self.result, self._session)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.result, name)


class _Conversation(RunHooks[Any]):
    """The items of one run as its model gets them, and the account of its requests.

    The SDK builds its input from the items of the whole run. A merge, or a message from outside,
    puts other items in the place of the first ones: `_start` in the place of the first `_replaced`.
    """

    def __init__(self, run: ForkingRun) -> None:
        self.is_replaced = False
        self._run = run
        self._start: Items = []
        self._replaced = 0
        self._winners = AgentsUsage()
        self._reservation: Reservation | None = None

    def of_run(self, config: RunConfig) -> RunConfig:
        """Returns the settings with this conversation before each request."""
        theirs = config.call_model_input_filter

        async def before(data: CallModelData[Any]) -> ModelInputData:
            data = replace(data, model_data=await self._before(data))
            if theirs is None:
                return data.model_data
            filtered: Any = theirs(data)
            made: ModelInputData = (
                filtered if isinstance(filtered, ModelInputData) else await filtered
            )
            return made

        return replace(config, call_model_input_filter=before)

    def items(self, of_run: Items) -> Items:
        """Returns the conversation, of all items of the run."""
        return [*self._start, *of_run[self._replaced :]]

    async def finish(self, result: AnyResult, session: Any) -> None:
        """Makes the winner's conversation that of the result and the session, after a merge."""
        if not self.is_replaced:
            return
        self.rewrite(result)
        if session is not None:
            await session.clear_session()
            await session.add_items(result.to_input_list())

    def rewrite(self, result: AnyResult) -> None:
        """Makes the result's conversation the winner's with what came after the merge."""
        later = len(result.to_input_list()) - self._replaced
        kept = len(result.new_items)
        while later and kept:
            kept -= 1
            later -= result.new_items[kept].type != "tool_approval_item"
        result.input, result.new_items = self._start, result.new_items[kept:]
        result.context_wrapper.usage.add(self._winners)

    def settle(self, used: Usage) -> None:
        """Ends the running request, if there is one."""
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            reservation.settle(used)

    async def on_llm_end(
        self,
        context: RunContextWrapper[Any],  # noqa: ARG002
        agent: Agent[Any],
        response: ModelResponse,
    ) -> None:
        used = response.usage
        price = self._price_of(agent)
        self.settle(cost(price, used.input_tokens, used.output_tokens))

    async def _before(self, data: CallModelData[Any]) -> ModelInputData:
        run, of_run = self._run, data.model_data.input
        merged = run.take_merged()
        if merged is not None:
            given: Any = merged.history_after_merge
            self._begin_with(of_run, [*given, _said(merged.notice)])
            self.is_replaced = True
            used = run.coordinator.branches[merged.winner_branch_id].cost_tracker
            self._winners.add(AgentsUsage(requests=used.requests, total_tokens=used.tokens))
        if run.branch is not None:
            await run.branch.pause.over()  # includes messages to the run meanwhile
        if steered := run.take_steered():
            self._begin_with(of_run, [*self.items(of_run), *map(_said, steered)])
        run.messages = self.items(of_run)
        extra = run.branch.spec.extra_instructions if run.branch is not None else None
        texts = (data.model_data.instructions, INSTRUCTIONS, extra)
        instructions = "\n\n".join(text for text in texts if text)
        if run.branch is not None:
            run.branch.capture(run.messages)
            self.settle(Usage())  # of a request that failed and is sent again
            is_priced = self._price_of(data.agent) is not None
            self._reservation = run.branch.reserve(is_priced=is_priced)
        return ModelInputData(input=copy.copy(run.messages), instructions=instructions)

    def _begin_with(self, of_run: Items, start: Items) -> None:
        self._start, self._replaced = start, len(of_run)

    def _price_of(self, agent: Agent[Any]) -> TokenPrice | None:
        branch = self._run.branch
        model = (branch.spec.model if branch is not None else None) or agent.model
        return self._run.forks.price(_name_of(model))


def model_judge(model: Any, price: Price | None = None) -> SingleJudge:
    """Returns a judge that asks a model of the SDK for a `JudgeVerdict`. None is the default model
    of the SDK."""

    async def judge(case: JudgeCase) -> Opinion:
        agent = Agent(name="judge", model=model, output_type=VERDICT)
        result = await Runner.run(agent, case.prompt)
        verdict: JudgeVerdict = result.final_output
        used = result.context_wrapper.usage
        known = None if price is None else price(_name_of(model))
        return Opinion(verdict=verdict, usage=cost(known, used.input_tokens, used.output_tokens))

    return judge


def _name_of(model: Any) -> str:
    return model if isinstance(model, str) else str(getattr(model, "model", ""))


def _in_text(function: Any) -> Any:
    @wraps(function)
    async def call(*arguments: Any, **options: Any) -> str:
        return as_text(await function(*arguments, **options))

    return call


def _said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _is_of_model(item: dict[str, Any]) -> bool:
    return item.get("role") == "assistant" or item.get("type") in ("function_call", "reasoning")


def _text(item: dict[str, Any]) -> str:
    if item.get("type") == "function_call":
        return f"{item.get('name')} {item.get('arguments', '')}"
    content = item.get("content", item.get("output", ""))
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) for part in content)
    return json.dumps(content)
