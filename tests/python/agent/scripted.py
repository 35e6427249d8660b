"""Agents for tests: scripted models, and tools that work in the run's workspace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic_ai import Agent, RunContext
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel

Step = ModelResponse | str


def say(text: str) -> ModelResponse:
    return ModelResponse(parts=[TextPart(content=text)])


def call(name: str, /, **arguments: Any) -> ModelResponse:
    return ModelResponse(parts=[ToolCallPart(tool_name=name, args=arguments)])


def model_of(
    answer: Callable[[list[ModelMessage]], ModelResponse], name: str = "scripted"
) -> FunctionModel:
    def function(messages: list[ModelMessage], _: AgentInfo) -> ModelResponse:
        return answer(messages)

    return FunctionModel(function, model_name=name)


def prompts(messages: list[ModelMessage]) -> list[str]:
    """All that users said, the oldest first."""
    return [
        str(part.content)
        for message in messages
        if isinstance(message, ModelRequest)
        for part in message.parts
        if isinstance(part, UserPromptPart)
    ]


def returned(messages: list[ModelMessage], tool: str | None = None) -> list[str]:
    """Returns the answers of tools, oldest first."""
    return [
        part.model_response_str()
        for message in messages
        if isinstance(message, ModelRequest)
        for part in message.parts
        if isinstance(part, ToolReturnPart) and tool in (None, part.tool_name)
    ]


def since_prompt(messages: list[ModelMessage]) -> int:
    """How many answers the model has given since a user spoke last."""
    count = 0
    for message in reversed(messages):
        if isinstance(message, ModelResponse):
            count += 1
        elif any(isinstance(part, UserPromptPart) for part in message.parts):
            return count
    return count


def working_agent(model: Any, **options: Any) -> Agent[Any, Any]:
    """An agent with a shell in its workspace."""
    agent: Agent[Any, Any] = Agent(model, **options)

    @agent.tool
    async def shell(ctx: RunContext[Any], command: str) -> str:
        """Run a command in the workspace."""
        done = await ctx.workspace.run(command, shell=True)
        return f"{done.stdout}{done.stderr}[exit {done.exit_code}]"

    return agent
