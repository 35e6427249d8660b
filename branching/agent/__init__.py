"""Forks of agent runs: conversation, files and budget are forked together, and one branch wins.

    front ends      pydantic_ai, openai_agents, langgraph,     (each with its own extra)
                    acorn, `branching fork`
        │                runner: runs a branch      codec: handles the conversation
    coordinator     fork, watch, steer, diff, merge, abort      one for each parent run
        │
    branching.fs    one BranchFS branch for each branch of the fork

This package does not depend on a language model or another package. It is configured by:

    RunnerFactory       called with a `BranchRuntime`, returns a `BranchRunner` for that branch:
                        `await run(prompt, history) -> RunOutcome`, `steer(text)`, `await stop()`
    ConversationCodec   dump, load, copy, turns, preview, tool_calls, … of a conversation;
                        `JsonCodec` is one for plain JSON messages
    ForkStateStore      in memory, or `SQLiteForkStateStore` beside the BranchFS store
    Judge, Tester       choose a winner; count the passed tests

A runner works in `branch.path`, starts processes with `branch.environment`, and calls

    with branch.request(expected) as meter:     # BudgetExhausted before anything is sent
        ...                                     # send
        meter.used(Usage(usd=…, tokens=…))
    branch.capture(messages)                    # before each request: the conversation so far
    await branch.ask("shell", "rm -rf build")   # "approve" or "deny"

A front end calls

    coordinator = ForkCoordinator(agent, deps, runner=factory, codec=codec, place=workspace)
    handle = await coordinator.fork([BranchSpec("a", "try A"), BranchSpec("b", "try B")],
                                    parent_history=messages)
    ...
    merged = await coordinator.merge_or_select(f"pick:{branch_id}")
    messages = merged.history_after_merge

The forked workspace or branch is frozen. The parent continues in its own branch
(`coordinator.parent_path`). A merge compares three states of each path: at the fork, in the parent
now, and in the winner.

Other modules: `diff` (reports), `merge` (three-way, atomic), `budget` (a ledger with reservations),
`fork_store`, `checkpoint`, `branch_files` (safe access to a branch's directory).
"""

from __future__ import annotations

from branching._lazy import lazy_exports

# Type checkers know this name; it need not be imported.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from branching._difftool import EditorDetector
    from branching.agent.branch_runtime import BranchRuntime
    from branching.agent.budget import Ledger
    from branching.agent.checkpoint import Checkpoint, InMemoryCheckpointStore
    from branching.agent.checkpoint_store import SQLiteCheckpointStore
    from branching.agent.coordinator import ForkCoordinator
    from branching.agent.cost_estimate import TokenPrice, project_cost
    from branching.agent.diff import build_diff_report, diff_tool_calls
    from branching.agent.errors import (
        BudgetExhausted,
        ForkBranchLimitError,
        ForkDepthLimitError,
        ForkStateError,
        ForkStoreError,
        MergeConflictError,
        UnknownPriceError,
    )
    from branching.agent.fork_store import InMemoryForkStateStore, SQLiteForkStateStore
    from branching.agent.function_runner import callable_runner
    from branching.agent.json_codec import JsonCodec
    from branching.agent.protocols import (
        BranchRunner,
        ConversationCodec,
        ForkStateStore,
        RunOutcome,
        ToolCall,
    )
    from branching.agent.types import (
        BranchChange,
        BranchCost,
        BranchDiffReport,
        BranchIsolation,
        BranchOutcome,
        BranchSpec,
        BranchState,
        BranchStatus,
        Budget,
        ConfidenceSignals,
        DiffSummary,
        FileChange,
        FlushError,
        FlushReport,
        ForkCostSummary,
        ForkHandle,
        MergeOptions,
        MergeResult,
        MergeStrategy,
        PathDiff,
        ResolveOutcome,
        Usage,
    )

_HOME = {
    "BranchChange": ".types",
    "BranchCost": ".types",
    "BranchDiffReport": ".types",
    "BranchIsolation": ".types",
    "BranchOutcome": ".types",
    "BranchRunner": ".protocols",
    "BranchRuntime": ".branch_runtime",
    "BranchSpec": ".types",
    "BranchState": ".types",
    "BranchStatus": ".types",
    "Budget": ".types",
    "BudgetExhausted": ".errors",
    "Checkpoint": ".checkpoint",
    "ConfidenceSignals": ".types",
    "ConversationCodec": ".protocols",
    "DiffSummary": ".types",
    "EditorDetector": "branching._difftool",
    "FileChange": ".types",
    "FlushError": ".types",
    "FlushReport": ".types",
    "ForkBranchLimitError": ".errors",
    "ForkCoordinator": ".coordinator",
    "ForkCostSummary": ".types",
    "ForkDepthLimitError": ".errors",
    "ForkHandle": ".types",
    "ForkStateError": ".errors",
    "ForkStateStore": ".protocols",
    "ForkStoreError": ".errors",
    "InMemoryCheckpointStore": ".checkpoint",
    "InMemoryForkStateStore": ".fork_store",
    "JsonCodec": ".json_codec",
    "Ledger": ".budget",
    "MergeConflictError": ".errors",
    "MergeOptions": ".types",
    "MergeResult": ".types",
    "MergeStrategy": ".types",
    "PathDiff": ".types",
    "ResolveOutcome": ".types",
    "RunOutcome": ".protocols",
    "SQLiteCheckpointStore": ".checkpoint_store",
    "SQLiteForkStateStore": ".fork_store",
    "TokenPrice": ".cost_estimate",
    "ToolCall": ".protocols",
    "UnknownPriceError": ".errors",
    "Usage": ".types",
    "build_diff_report": ".diff",
    "callable_runner": ".function_runner",
    "diff_tool_calls": ".diff",
    "project_cost": ".cost_estimate",
}
"""Which module has the name; it is loaded when the name is first used."""

__all__ = [
    "BranchChange",
    "BranchCost",
    "BranchDiffReport",
    "BranchIsolation",
    "BranchOutcome",
    "BranchRunner",
    "BranchRuntime",
    "BranchSpec",
    "BranchState",
    "BranchStatus",
    "Budget",
    "BudgetExhausted",
    "Checkpoint",
    "ConfidenceSignals",
    "ConversationCodec",
    "DiffSummary",
    "EditorDetector",
    "FileChange",
    "FlushError",
    "FlushReport",
    "ForkBranchLimitError",
    "ForkCoordinator",
    "ForkCostSummary",
    "ForkDepthLimitError",
    "ForkHandle",
    "ForkStateError",
    "ForkStateStore",
    "ForkStoreError",
    "InMemoryCheckpointStore",
    "InMemoryForkStateStore",
    "JsonCodec",
    "Ledger",
    "MergeConflictError",
    "MergeOptions",
    "MergeResult",
    "MergeStrategy",
    "PathDiff",
    "ResolveOutcome",
    "RunOutcome",
    "SQLiteCheckpointStore",
    "SQLiteForkStateStore",
    "TokenPrice",
    "ToolCall",
    "UnknownPriceError",
    "Usage",
    "build_diff_report",
    "callable_runner",
    "diff_tool_calls",
    "project_cost",
]


__getattr__ = lazy_exports(__name__, _HOME)
