"""Agents of pydantic-ai that fork. Needs the extra `agent`: pip install ".[agent]" in the source.

LiveForkCapability   lets an agent fork its runs, by seven tools
AgentRunner          an agent's run in one branch, for a coordinator of one's own
agent_candidate      an agent's run as a candidate of any pattern (`Speculate`, `BestOfN`, ...)
BranchWorkspace      a branch as pydantic-ai's workspace
MessagesCodec        pydantic-ai's conversations, for the coordinator
JudgeVerdict, model_judge   a model as the judge
"""

from __future__ import annotations

try:
    import pydantic_ai as _pydantic_ai  # noqa: F401
except ImportError as error:
    raise ImportError(
        'branching.agent.pydantic_ai needs its extra: pip install ".[agent]" in the source tree'
    ) from error

from branching.agent.pydantic_ai.candidate import agent_candidate
from branching.agent.pydantic_ai.capability import LiveForkCapability, coordinator_of, forking
from branching.agent.pydantic_ai.codec import (
    MessagesCodec,
    count_retry_parts,
    count_stuck_loop_hits,
)
from branching.agent.pydantic_ai.judge import JudgeVerdict, model_judge
from branching.agent.pydantic_ai.prices import Price, listed_price
from branching.agent.pydantic_ai.runner import AgentRunner, RunnerOptions, current_branch
from branching.agent.pydantic_ai.workspace import BranchWorkspace

__all__ = [
    "AgentRunner",
    "BranchWorkspace",
    "JudgeVerdict",
    "LiveForkCapability",
    "MessagesCodec",
    "Price",
    "RunnerOptions",
    "agent_candidate",
    "coordinator_of",
    "count_retry_parts",
    "count_stuck_loop_hits",
    "current_branch",
    "forking",
    "listed_price",
    "model_judge",
]
