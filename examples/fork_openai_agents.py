#!/usr/bin/env python3
"""An agent of the OpenAI Agents SDK that forks itself, without a network.

    python examples/fork_openai_agents.py DIRECTORY

The agent is asked for a greeting. It forks into two branches that write it in two languages, each
with files of its own, and keeps one: its files and its conversation. `Recorded` stands for a model;
leave `model=` out, or name another one, to use a real model.
Needs the extra (`pip install ".[openai-agents]"`) and the program branchfs.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from agents import Agent, Model, ModelResponse, RunConfig, Usage
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)

from branching import Workspace
from branching.agent.checkpoint import InMemoryCheckpointStore
from branching.agent.openai_agents import LiveFork

GREETINGS = {"english": "Hello", "french": "Bonjour"}


class Recorded(Model):
    """What a model said once, for each point of the conversation."""

    async def get_response(
        self,
        system_instructions: Any,  # noqa: ARG002
        input: Any,  # noqa: A002
        *_: Any,
        **__: Any,
    ) -> ModelResponse:
        last = input[-1]
        told = last.get("output") or last.get("content")
        greet = re.match(r"Greet in (\w+)", str(told))
        if greet:  # in a branch
            return call("run_command", command=f"echo {GREETINGS[greet[1]]} > greeting")
        if str(told).startswith("Merged"):
            return say(told)
        if last.get("type") != "function_call_output":
            specs = [{"label": name, "steer": f"Greet in {name}"} for name in GREETINGS]
            return call("fork_run", specs=specs)
        branch = re.search(r"- (\S+) \(french\)", told)
        return call("merge_or_select", action=f"pick:{branch[1]}") if branch else say("Written.")

    def stream_response(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        raise NotImplementedError


def say(text: str) -> ModelResponse:
    content = ResponseOutputText(type="output_text", text=text, annotations=[])
    message = ResponseOutputMessage(
        type="message", role="assistant", status="completed", id="said", content=[content]
    )
    return ModelResponse(output=[message], usage=Usage(requests=1), response_id=None)


def call(name: str, **arguments: Any) -> ModelResponse:
    called = ResponseFunctionToolCall(
        type="function_call", name=name, call_id=f"call-{name}", arguments=json.dumps(arguments)
    )
    return ModelResponse(output=[called], usage=Usage(requests=1), response_id=None)


async def main(directory: Path) -> None:
    agent: Agent[Any] = Agent(name="greeter", model=Recorded())
    with Workspace.open(directory) as workspace:
        async with LiveFork(
            agent,
            place=workspace,
            checkpoint_store=InMemoryCheckpointStore(),
            run_config=RunConfig(tracing_disabled=True),
        ) as forks:
            result = await forks.run("Write a greeting.")
            print(result.final_output)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
