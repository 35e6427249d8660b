"""Agents of pydantic-ai that fork. Needs the extra `agent`: pip install ".[agent]" in the source.

LiveForkCapability   lets an agent fork its runs, by seven tools
agent_coordinator    a coordinator whose branches run an agent
AgentRunner          an agent's run in one branch, for a coordinator of one's own
agent_candidate      an agent's run as a candidate of any pattern (`Speculate`, `BestOfN`, ...)
BranchWorkspace      a branch as pydantic-ai's workspace
MessagesCodec        pydantic-ai's conversations, for the coordinator
JudgeVerdict, model_judge   a model as the judge

Names of the published documents, for programs that were written after them: `BranchOverlay` (the
files of a branch), `BranchDiffAgreement`, `BranchDiffOperation`, `ForkMaterializer` (the mirror of
the branches), `JudgeAgent`, `clone_for_branch`, `compute_confidence`, `create_fork_toolset`.
"""

from __future__ import annotations

try:
    import pydantic_ai as _pydantic_ai  # noqa: F401
except ImportError as error:
    raise ImportError(
        'branching.agent.pydantic_ai needs its extra: pip install ".[agent]" in the source tree'
    ) from error

from branching.agent.branch_files import BranchFiles as BranchOverlay
from branching.agent.confidence import compute_confidence
from branching.agent.judge_verdict import JudgeVerdict
from branching.agent.materializer import Mirror as ForkMaterializer
from branching.agent.pydantic_ai.candidate import agent_candidate
from branching.agent.pydantic_ai.capability import (
    LiveForkCapability,
    coordinator_of,
    create_fork_toolset,
    forking,
)
from branching.agent.pydantic_ai.codec import (
    MessagesCodec,
    count_retry_parts,
    count_stuck_loop_hits,
)
from branching.agent.pydantic_ai.deps import branch_deps as clone_for_branch
from branching.agent.pydantic_ai.judge import JudgeAgent, model_judge
from branching.agent.pydantic_ai.pricing import Price, listed_price
from branching.agent.pydantic_ai.runner import (
    AgentRunner,
    RunnerOptions,
    agent_coordinator,
    current_branch,
)
from branching.agent.pydantic_ai.workspace import BranchWorkspace
from branching.agent.types import Agreement as BranchDiffAgreement
from branching.agent.types import Operation as BranchDiffOperation

__all__ = [
    "AgentRunner",
    "BranchDiffAgreement",
    "BranchDiffOperation",
    "BranchOverlay",
    "BranchWorkspace",
    "ForkMaterializer",
    "JudgeAgent",
    "JudgeVerdict",
    "LiveForkCapability",
    "MessagesCodec",
    "Price",
    "RunnerOptions",
    "agent_candidate",
    "agent_coordinator",
    "clone_for_branch",
    "compute_confidence",
    "coordinator_of",
    "count_retry_parts",
    "count_stuck_loop_hits",
    "create_fork_toolset",
    "current_branch",
    "forking",
    "listed_price",
    "model_judge",
]
