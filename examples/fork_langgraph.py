#!/usr/bin/env python3
"""A graph of LangGraph that forks itself, without a network.

    python examples/fork_langgraph.py DIRECTORY

The agent is asked for a greeting. It forks into two branches that write it in two languages, each
with files of its own, and keeps one: its files and its conversation. The node `recorded` stands for
a model: in its place call a chat model with `bind_tools(tools)`.
Needs the extra (`pip install ".[langgraph]"`) and the program branchfs.
"""

from __future__ import annotations

import asyncio
import re
import sys
import uuid
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from branching import Workspace
from branching.agent.checkpoint import InMemoryCheckpointStore
from branching.agent.langgraph import LiveFork

GREETINGS = {"english": "Hello", "french": "Bonjour"}


def recorded(state: MessagesState) -> dict[str, Any]:
    """What a model said once, for each point of the conversation."""
    last = state["messages"][-1]
    told = str(last.content)
    greet = re.match(r"Greet in (\w+)", told)
    branch = re.search(r"- (\S+) \(french\)", told)
    if greet:  # in a branch
        return call("run_command", command=f"echo {GREETINGS[greet[1]]} > greeting")
    if branch:
        return call("merge_or_select", action=f"pick:{branch[1]}")
    if isinstance(last, HumanMessage):
        specs = [{"label": name, "steer": f"Greet in {name}"} for name in GREETINGS]
        return call("fork_run", specs=specs)
    return {"messages": [AIMessage(told)]}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    made = {"name": name, "args": arguments, "id": uuid.uuid4().hex}
    return {"messages": [AIMessage("", tool_calls=[made])]}


def build(tools: list[Any]) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("model", recorded)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


async def main(directory: Path) -> None:
    with Workspace.open(directory) as workspace:
        checkpoints = InMemoryCheckpointStore()
        async with LiveFork(build, place=workspace, checkpoint_store=checkpoints) as forks:
            state = await forks.graph.ainvoke({"messages": [HumanMessage("Write a greeting.")]})
            print(state["messages"][-1].content)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
