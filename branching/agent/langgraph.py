"""Live forking for LangGraph graphs. Requires the extra `langgraph`.

    async with LiveFork(build, place=workspace) as forks:
        state = await forks.graph.ainvoke({"messages": [("user", "Try it in two ways.")]}, config)
        await forks.graph.ainvoke({"messages": [*state["messages"], ("user", "Go on.")]}, config)

`build(tools)` returns the compiled graph of an agent that calls these tools, in a `ToolNode` or as
`create_agent` does; its state has a list of messages. Your own tools and nodes call
`forks.files.run(...)`, which works in the branch of the calling run. `merge_or_select` returns a
`Command` that replaces the messages in the graph's state by the winner's, so that a checkpointer
saves them and the conversation continues from them.

A branch is a run of the same graph, on its own thread. An `interrupt` in it requests the branch's
approval, and is resumed with "approve" or "deny". A message to a branch is its next prompt when
its run ends. A spec's `model` is `config["configurable"]["model"]`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import Parameter, signature
from typing import Any, get_type_hints

try:
    from langchain_core.callbacks import AsyncCallbackHandler
    from langchain_core.messages import (
        AIMessage,
        BaseMessage,
        HumanMessage,
        RemoveMessage,
        SystemMessage,
        ToolMessage,
        messages_from_dict,
        messages_to_dict,
    )
    from langchain_core.outputs import ChatGeneration, LLMResult
    from langchain_core.tools import BaseTool, StructuredTool
    from langgraph.graph.message import REMOVE_ALL_MESSAGES
    from langgraph.prebuilt import ToolRuntime
    from langgraph.types import Command
except ImportError as error:
    raise ImportError(
        'branching.agent.langgraph needs its extra: pip install ".[langgraph]" in the source tree'
    ) from error

from branching.agent.branch_runtime import BranchRuntime
from branching.agent.budget import Reservation
from branching.agent.fork_tools import SEQUENTIAL
from branching.agent.json_codec import STUCK_MARK, copied_after, preview_of
from branching.agent.judge import JudgeCase, SingleJudge
from branching.agent.judge_verdict import JudgeVerdict
from branching.agent.live_fork import ForkingRun, as_text, cost
from branching.agent.live_fork import LiveFork as _LiveFork
from branching.agent.protocols import History, RunOutcome, ToolCall
from branching.agent.types import MergeResult, Usage

Messages = list[Any]
"""Messages of LangChain."""
OnBranchEvent = Callable[[BranchRuntime, tuple[BaseMessage, dict[str, Any]]], None]
"""Receives a message of a branch's run, or a piece of it, and its metadata."""


class MessagesCodec:
    """A list of LangChain's messages."""

    def dump(self, history: History) -> bytes:
        return json.dumps(messages_to_dict(history or [])).encode()

    def load(self, data: bytes) -> Messages:
        return list(messages_from_dict(json.loads(data)))

    def copy(self, history: History) -> Messages:
        return copied_after(history or [], [])

    def copy_after(self, history: History, earlier: History) -> Messages:
        return copied_after(history or [], earlier or [])

    def turns(self, history: History) -> int:
        return sum(isinstance(message, AIMessage) for message in history or [])

    def preview(self, history: History) -> str:
        return preview_of(str(history[-1].text) if history else "")

    def tool_calls(self, history: History) -> Sequence[ToolCall]:
        return [
            ToolCall(name=call["name"], arguments=json.dumps(call["args"]))
            for message in history or []
            if isinstance(message, AIMessage)
            for call in message.tool_calls
        ]

    def retries(self, history: History) -> int:
        return sum(
            isinstance(message, ToolMessage) and message.status == "error"
            for message in history or []
        )

    def stuck_loop_hits(self, history: History) -> int:
        return sum(STUCK_MARK in str(message.text).lower() for message in history or [])


class LiveFork(_LiveFork):
    """One conversation of a graph that can fork itself. See the module."""

    def __init__(
        self,
        build: Callable[[list[BaseTool]], Any],
        *,
        messages_key: str = "messages",
        on_branch_event: OnBranchEvent | None = None,
        **options: Any,
    ) -> None:
        """Prepares a conversation.

        Args:
            build: Returns the compiled graph of an agent with the tools that it is given: the fork
                tools and `run_command`.
            messages_key: The field of the state that holds the messages.
            on_branch_event: Receives each branch, and the messages of its runs with their metadata,
                in pieces if the model streams (LangGraph's stream mode "messages").
            options: Of the base: place, judge, price, and those of `ForkCoordinator`.
        """
        super().__init__(codec=MessagesCodec(), **options)
        self._messages_key = messages_key
        self._on_branch_event = on_branch_event
        self.graph: Any = build([self._tool(function) for function in self.functions()])

    async def run_branch(self, run: ForkingRun, prompt: str, history: History) -> RunOutcome:
        branch = run.branch
        assert branch is not None
        extra = branch.spec.extra_instructions
        messages: Messages = [*(history or [])]
        if extra:
            messages.append(SystemMessage(extra))
        messages.append(HumanMessage(prompt))
        meter = _Meter(run)
        try:
            while True:
                messages = await self._run_graph(run, messages, meter)
                if not (steered := run.take_steered()):
                    break
                messages += map(HumanMessage, steered)
        finally:
            meter.release()
        final = str(messages[-1].text) if messages else ""
        return RunOutcome(history=messages, output=final, final_message=final)

    async def _run_graph(self, run: ForkingRun, messages: Messages, meter: _Meter) -> Messages:
        branch = run.branch
        assert branch is not None
        thread: dict[str, Any] = {"thread_id": uuid.uuid4().hex}  # the state begins with `messages`
        if branch.spec.model is not None:
            thread["model"] = branch.spec.model
        config = {"callbacks": [meter], "configurable": thread}
        given: Any = {self._messages_key: messages}
        while given is not None:
            asked = None
            modes = ["values", "updates", *(["messages"] if self._on_branch_event else [])]
            async for mode, step in self.graph.astream(given, config, stream_mode=modes):
                if mode == "messages":
                    assert self._on_branch_event is not None, "the mode was asked for"
                    self._on_branch_event(branch, step)
                    continue
                if mode == "updates":
                    asked = step.get("__interrupt__", asked)
                    continue
                messages = _field(step, self._messages_key)
                if not _is_calling(messages):
                    run.messages = messages
                    branch.capture(messages)
            given = None
            if asked:
                answers = {
                    each.id: await branch.ask("interrupt", str(each.value)) for each in asked
                }
                given = Command(resume=answers)
        return list(messages)

    def _tool(self, function: Any) -> BaseTool:
        """Returns a tool of LangChain. A fork and a merge get the run's state, which they read and
        replace."""
        name = function.__name__

        async def call(runtime: Any = None, **arguments: Any) -> Any:
            if name not in SEQUENTIAL:
                return as_text(await function(**arguments))
            run = self.run_now
            messages = _field(runtime.state, self._messages_key)
            run.messages = messages[:-1] if _is_calling(messages) else messages
            answer = as_text(await function(**arguments))
            merged = run.take_merged()
            if merged is None:
                return answer
            return self._adopting(merged, messages[-1], runtime.tool_call_id)

        wraps(function)(call)
        shape = signature(function)
        hints = get_type_hints(function)
        parameters = [
            each.replace(annotation=hints[each.name]) for each in shape.parameters.values()
        ]
        if name in SEQUENTIAL:
            hints["runtime"] = ToolRuntime
            parameters.append(Parameter("runtime", Parameter.KEYWORD_ONLY, annotation=ToolRuntime))
        del vars(call)["__wrapped__"]  # the tool's parameters are those of our function
        call.__annotations__ = hints
        vars(call)["__signature__"] = shape.replace(parameters=parameters)
        return StructuredTool.from_function(coroutine=call, name=name, parse_docstring=True)

    def _adopting(self, merged: MergeResult, asking: BaseMessage, call_id: str) -> Command[Any]:
        """Returns the command that makes the winner's messages the state's, with this call of the
        merge after them. Later calls of the same message are kept, their results follow."""
        calls = asking.tool_calls if isinstance(asking, AIMessage) else []
        ids = [call["id"] for call in calls]
        later = calls[ids.index(call_id) :]
        given: Any = merged.history_after_merge
        messages = [
            RemoveMessage(id=REMOVE_ALL_MESSAGES),
            *given,
            AIMessage(content="", tool_calls=later),
            ToolMessage(merged.notice, tool_call_id=call_id),
        ]
        return Command(update={self._messages_key: messages})


class _Meter(AsyncCallbackHandler):
    """The account of a branch's requests."""

    raise_error = True  # a request that its budget refuses is not sent

    def __init__(self, run: ForkingRun) -> None:
        self._run = run
        self._open: dict[uuid.UUID, tuple[Reservation, str]] = {}

    async def on_chat_model_start(
        self,
        serialized: dict[str, Any],  # noqa: ARG002
        messages: list[list[BaseMessage]],  # noqa: ARG002
        *,
        run_id: uuid.UUID,
        metadata: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        branch = self._run.branch
        assert branch is not None
        await branch.pause.over()
        name = str((metadata or {}).get("ls_model_name", ""))
        is_priced = self._run.forks.price(name) is not None
        self._open[run_id] = branch.reserve(is_priced=is_priced), name

    async def on_llm_end(self, response: LLMResult, *, run_id: uuid.UUID, **_: Any) -> None:
        reservation, name = self._open.pop(run_id)
        sent = received = 0
        for generation in (each for answers in response.generations for each in answers):
            message = generation.message if isinstance(generation, ChatGeneration) else None
            used = getattr(message, "usage_metadata", None) or {}
            sent += used.get("input_tokens", 0)
            received += used.get("output_tokens", 0)
        reservation.settle(cost(self._run.forks.price(name), sent, received))

    async def on_llm_error(self, error: BaseException, *, run_id: uuid.UUID, **_: Any) -> None:  # noqa: ARG002
        if run_id in self._open:
            self._open.pop(run_id)[0].release()

    def release(self) -> None:
        """Ends requests that were cut off."""
        while self._open:
            self._open.popitem()[1][0].settle(Usage())


def model_judge(model: Any) -> SingleJudge:
    """Returns a judge that asks a chat model of LangChain for a `JudgeVerdict`."""

    async def judge(case: JudgeCase) -> Any:
        return await model.with_structured_output(JudgeVerdict).ainvoke(case.prompt)

    return judge


def _field(state: Any, name: str) -> Messages:
    value: Messages = state[name] if isinstance(state, dict) else getattr(state, name)
    return value


def _is_calling(messages: Messages) -> bool:
    """Tells whether the last message calls tools that have not answered."""
    return bool(messages) and isinstance(messages[-1], AIMessage) and bool(messages[-1].tool_calls)
