"""A scripted model for each agent framework that has an adapter, behind one small interface.

A script is called with the conversation as plain `Said` values and answers with text or calls.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agents import Agent, Model, ModelResponse, RunConfig
from agents import Usage as AgentsUsage
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseTextDeltaEvent,
    ResponseUsage,
)
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails

from branching.agent import langgraph, openai_agents
from branching.agent.live_fork import LiveFork

TURNS_MAX = 30
SENT_TOKENS, RECEIVED_TOKENS = 1000, 10
"""What each request of a scripted model uses."""


@dataclass(frozen=True)
class Said:
    """One message: `kind` is user, assistant, call or result."""

    kind: str
    text: str
    arguments: dict[str, Any] = field(default_factory=dict)


Answer = str | Sequence[Said]
Script = Callable[[list[Said]], Answer]


def call(name: str, /, **arguments: Any) -> list[Said]:
    return [Said("call", name, arguments)]


class Framework:
    """One framework: how a conversation in it begins, goes on and is read."""

    def forks(self, script: Script, **options: Any) -> LiveFork:
        raise NotImplementedError

    async def turn(self, forks: LiveFork, prompt: str, history: Sequence[Any] = ()) -> list[Any]:
        """Runs the parent's agent; returns the framework's messages."""
        raise NotImplementedError

    def read(self, messages: Sequence[Any]) -> list[Said]:
        raise NotImplementedError

    def unmatched(self, messages: Sequence[Any]) -> set[str]:
        """Returns the ids of calls without a result and of results without a call."""
        raise NotImplementedError


class OpenAIAgents(Framework):
    def forks(self, script: Script, **options: Any) -> LiveFork:
        agent = Agent[Any](name="worker", instructions="Work.", model=_AgentsModel(self, script))
        agent.tools = options.pop("tools", [])
        config = RunConfig(tracing_disabled=True)
        return openai_agents.LiveFork(agent, run_config=config, **options)

    async def turn(self, forks: LiveFork, prompt: str, history: Sequence[Any] = ()) -> list[Any]:
        assert isinstance(forks, openai_agents.LiveFork)
        given = [*history, {"role": "user", "content": prompt}]
        result = await forks.run(given, max_turns=TURNS_MAX)
        return list(result.to_input_list())

    def read(self, messages: Sequence[Any]) -> list[Said]:
        return [_of_item(item) for item in messages]

    def unmatched(self, messages: Sequence[Any]) -> set[str]:
        calls = {each["call_id"] for each in messages if each.get("type") == "function_call"}
        answered = {each["call_id"] for each in messages if "output" in each}
        return calls ^ answered


class LangGraph(Framework):
    def forks(self, script: Script, **options: Any) -> LiveFork:
        own = options.pop("tools", [])
        compiling = options.pop("compiling", {})

        def build(tools: list[Any]) -> Any:
            model = _ChatModel(script=lambda messages: script(self.read(messages)))
            tools = [*own, *tools]

            # Python 3.10 does not hand the configuration on to what a node awaits.
            async def ask(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
                return {"messages": [await model.ainvoke(state["messages"], config)]}

            graph = StateGraph(MessagesState)
            graph.add_node("model", ask)
            graph.add_node("tools", ToolNode(tools))
            graph.add_edge(START, "model")
            graph.add_conditional_edges("model", tools_condition)
            graph.add_edge("tools", "model")
            return graph.compile(**compiling)

        return langgraph.LiveFork(build, **options)

    async def turn(self, forks: LiveFork, prompt: str, history: Sequence[Any] = ()) -> list[Any]:
        assert isinstance(forks, langgraph.LiveFork)
        state = await forks.graph.ainvoke({"messages": [*history, HumanMessage(prompt)]})
        return list(state["messages"])

    def read(self, messages: Sequence[Any]) -> list[Said]:
        return [said for message in messages for said in _of_message(message)]

    def unmatched(self, messages: Sequence[Any]) -> set[str]:
        calls = {
            str(call["id"])
            for message in messages
            if isinstance(message, AIMessage)
            for call in message.tool_calls
        }
        return calls ^ {each.tool_call_id for each in messages if isinstance(each, ToolMessage)}


FRAMEWORKS: dict[str, Framework] = {"openai-agents": OpenAIAgents(), "langgraph": LangGraph()}


class _AgentsModel(Model):
    model = "scripted"

    def __init__(self, framework: OpenAIAgents, script: Script) -> None:
        self._framework = framework
        self._script = script
        self._calls = 0

    async def get_response(
        self,
        system_instructions: Any,
        input: Any,  # noqa: A002
        *_: Any,
        **__: Any,
    ) -> ModelResponse:
        answer = self._script(self._framework.read(input))
        output: list[Any] = []
        for said in [Said("assistant", answer)] if isinstance(answer, str) else answer:
            self._calls += 1
            if said.kind == "call":
                output.append(
                    ResponseFunctionToolCall(
                        type="function_call",
                        name=said.text,
                        call_id=f"call-{self._calls}",
                        arguments=json.dumps(said.arguments),
                    )
                )
            else:
                text = ResponseOutputText(type="output_text", text=said.text, annotations=[])
                output.append(
                    ResponseOutputMessage(
                        type="message",
                        role="assistant",
                        status="completed",
                        id=f"message-{self._calls}",
                        content=[text],
                    )
                )
        usage = AgentsUsage(
            requests=1,
            input_tokens=SENT_TOKENS,
            output_tokens=RECEIVED_TOKENS,
            total_tokens=SENT_TOKENS + RECEIVED_TOKENS,
        )
        return ModelResponse(output=output, usage=usage, response_id=None)

    async def stream_response(
        self,
        system_instructions: Any,
        input: Any,  # noqa: A002
        *_: Any,
        **__: Any,
    ) -> AsyncIterator[Any]:
        answer = await self.get_response(system_instructions, input)
        for number, item in enumerate(answer.output):
            if isinstance(item, ResponseOutputMessage):
                for word in item.content[0].text.split(" "):  # type: ignore[union-attr]
                    yield ResponseTextDeltaEvent(
                        type="response.output_text.delta",
                        item_id=item.id,
                        output_index=number,
                        content_index=0,
                        delta=word,
                        logprobs=[],
                        sequence_number=number,
                    )
        usage = ResponseUsage(
            input_tokens=SENT_TOKENS,
            output_tokens=RECEIVED_TOKENS,
            total_tokens=SENT_TOKENS + RECEIVED_TOKENS,
            input_tokens_details=InputTokensDetails(cached_tokens=0, cache_write_tokens=0),
            output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
        )
        response = Response(
            id=f"response-{self._calls}",
            created_at=0,
            model=self.model,
            object="response",
            output=answer.output,
            parallel_tool_calls=True,
            tool_choice="auto",
            tools=[],
            usage=usage,
        )
        yield ResponseCompletedEvent(
            type="response.completed", response=response, sequence_number=99
        )


def _of_item(item: Any) -> Said:
    kind = item.get("type", "message")
    if kind == "function_call":
        return Said("call", item["name"], json.loads(item["arguments"]))
    if kind == "function_call_output":
        return Said("result", item["output"])
    content = item["content"]
    text = content if isinstance(content, str) else content[0]["text"]
    return Said(item["role"], text)


class _ChatModel(BaseChatModel):
    script: Callable[[list[BaseMessage]], Answer]
    model_name: str = "scripted"

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        answer = self.script(messages)
        usage = {
            "input_tokens": SENT_TOKENS,
            "output_tokens": RECEIVED_TOKENS,
            "total_tokens": SENT_TOKENS + RECEIVED_TOKENS,
        }
        text, calls = (answer, []) if isinstance(answer, str) else ("", answer)
        message = AIMessage(
            content=text,
            usage_metadata=usage,
            tool_calls=[
                {"name": each.text, "args": each.arguments, "id": uuid.uuid4().hex}
                for each in calls
            ],
        )
        return ChatResult(generations=[ChatGeneration(message=message)])


def _of_message(message: BaseMessage) -> list[Said]:
    if isinstance(message, ToolMessage):
        return [Said("result", str(message.content))]
    if isinstance(message, AIMessage) and message.tool_calls:
        return [Said("call", each["name"], each["args"]) for each in message.tool_calls]
    kind = "assistant" if isinstance(message, AIMessage) else "user"
    return [Said(kind, str(message.content))]
