#!/usr/bin/env python3
"""An agent that forks itself, without a network: a recorded model, a shell and git in branches.

    python examples/fork_offline.py DIRECTORY

The agent is asked for a program that adds. It forks into two branches that try two ways, each with
files of its own; the tests of one pass, and that one is kept: its files, its commit, its turns.
Needs the extra (`pip install ".[agent]"`), the program branchfs, and git.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

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

from branching import Workspace
from branching.agent.checkpoint import InMemoryCheckpointStore
from branching.agent.command import best_tested
from branching.agent.pydantic_ai import LiveForkCapability

GIT = "git -c user.name=agent -c user.email=agent@example.org"
WAYS = {
    "subtracts": "printf 'def add(a, b):\\n    return a - b\\n' > adder.py",
    "adds": "printf 'def add(a, b):\\n    return a + b\\n' > adder.py",
}
TESTS = "python3 -c 'from adder import add; assert add(2, 3) == 5'"


def recorded(messages: list[ModelMessage], _: AgentInfo) -> ModelResponse:
    """What a model said once, for each point of the conversation."""
    requests = [message for message in messages if isinstance(message, ModelRequest)]
    parts = [part for request in requests for part in request.parts]
    prompt = [str(part.content) for part in parts if isinstance(part, UserPromptPart)][-1]
    last = parts[-1]
    tool = last.tool_name if isinstance(last, ToolReturnPart) else ""
    way = re.match(r"Write it so that it (\w+)", prompt)
    if way:  # in a branch
        if tool != "shell":
            command = f"{WAYS[way[1]]} && {GIT} add -A && {GIT} commit -qm 'It {way[1]}'"
            return ModelResponse(parts=[ToolCallPart("shell", {"command": command})])
        return ModelResponse(parts=[TextPart(f"Written: it {way[1]}.")])
    if prompt.startswith("Merged"):
        return ModelResponse(parts=[TextPart(prompt)])
    if not tool:
        specs = [{"label": name, "steer": f"Write it so that it {name}."} for name in WAYS]
        arguments = {"specs": specs, "strategy": {"kind": "auto"}}
        return ModelResponse(parts=[ToolCallPart("fork_run", arguments)])
    if tool == "fork_run":
        return ModelResponse(parts=[ToolCallPart("merge_or_select", {"action": "auto"})])
    return ModelResponse(parts=[TextPart(str(last.content))])  # type: ignore[union-attr]


async def main(directory: Path) -> None:
    with Workspace.open(directory) as workspace:
        agent = Agent(
            FunctionModel(recorded),
            capabilities=[
                LiveForkCapability(
                    place=workspace,
                    judge=best_tested,
                    test_command=TESTS,
                    checkpoint_store=InMemoryCheckpointStore(),
                )
            ],
        )

        @agent.tool
        async def shell(ctx: RunContext[None], command: str) -> str:
            """Run a command in the workspace."""
            done = await ctx.workspace.run(command, shell=True)
            return f"{done.stdout}{done.stderr}[exit {done.exit_code}]"

        result = await agent.run("Write add(a, b) into adder.py.")
    print(result.output)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
