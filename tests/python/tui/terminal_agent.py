"""An agent for a chat on a terminal: `run COMMAND` calls its shell, `think FILE` waits for one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from pydantic_ai import Agent, RunContext
from pydantic_ai.messages import ModelMessage, ModelRequest, ToolReturnPart, UserPromptPart
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel


async def _answer(messages: list[ModelMessage], _: AgentInfo) -> AsyncIterator[Any]:
    parts = [part for m in messages if isinstance(m, ModelRequest) for part in m.parts]
    prompts = [str(part.content) for part in parts if isinstance(part, UserPromptPart)]
    returned = [part for part in messages[-1].parts if isinstance(part, ToolReturnPart)]
    verb, _space, rest = prompts[-1].partition(" ")
    if returned:
        yield f"it said: {returned[-1].model_response_str()}"
    elif verb == "run":
        arguments = json.dumps({"command": rest})
        yield {0: DeltaToolCall(name="shell", json_args=arguments, tool_call_id="1")}
    else:
        while verb == "think" and not Path(rest).exists():
            await asyncio.sleep(0.05)
        yield f"prompt {len(prompts)} "
        yield f"was: {prompts[-1]}\n"


agent = Agent(FunctionModel(stream_function=_answer))


@agent.tool
async def shell(ctx: RunContext[Any], command: str) -> str:
    """Run a command in the workspace."""
    done = await ctx.workspace.run(command, shell=True)
    return f"{done.stdout}{done.stderr}[exit {done.exit_code}]"
