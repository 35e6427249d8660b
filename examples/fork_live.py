#!/usr/bin/env python3
"""An agent that forks itself, on a real model.

    export ANTHROPIC_API_KEY=...
    pip install ".[agent]" "pydantic-ai-slim[anthropic]"
    python examples/fork_live.py DIRECTORY "Make the tests pass" [MODEL]

Each branch may cost 50 cents at most, all of them 2 dollars. The project's own tests and the judge
decide; where the judge is not sure enough, the agent says so, and nothing is merged.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from pydantic_ai import Agent, RunContext

from branching import Workspace
from branching.agent.checkpoint import InMemoryCheckpointStore
from branching.agent.pydantic_ai import LiveForkCapability

MODEL = "anthropic:claude-sonnet-4-5"
INSTRUCTIONS = """\
You work on the project in the current directory, with a shell. When there is more than one way to
go, fork into a branch for each, with budget_usd=0.5 and aggregate_budget_usd=2. When all are done,
call merge_or_select("auto")."""


async def main(directory: Path, task: str, model: str = MODEL) -> None:
    with Workspace.open(directory) as workspace:
        agent = Agent(
            model,
            instructions=INSTRUCTIONS,
            capabilities=[
                LiveForkCapability(
                    place=workspace,
                    test_command="auto",
                    checkpoint_store=InMemoryCheckpointStore(),
                )
            ],
        )

        @agent.tool
        async def shell(ctx: RunContext[None], command: str) -> str:
            """Run a shell command in the project. Files can be read and written by it, too."""
            done = await ctx.workspace.run(command, shell=True, timeout=300)
            return f"{done.stdout[-20_000:]}{done.stderr[-5_000:]}[exit {done.exit_code}]"

        result = await agent.run(task)
    print(result.output)
    print(f"{result.usage.requests} requests by the parent", file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
