"""Agents in Acorn's manner: classes with tools, which branch. Needs the extra `agent`.

    class Reviewer(Module):
        "Reviews one file."
        initial_input = File
        final_output = Findings

    class Author(Module):
        "Writes and has it reviewed."
        model = "openai:gpt-5-mini"
        branches = [Reviewer]

        @tool
        def save(self, path: str, text: str) -> str: ...

The model of `Author` finds a tool `branch`, with which it sends a `Reviewer` off: with a copy of
the conversation, the tools of all levels above it, and, in a workspace, files of its own. What the
branch comes to is put together for the parent as `merge` says. Code does the same by
`self.branch(Reviewer, path=...)`.

    Module        an agent; a subclass is the kind, an instance runs
    tool          makes a method a tool
    BranchError   a branch that code has started came to nothing

One coordinator is under it: a branch is a fork of one, with its budget, its files and its merge.
"""

from __future__ import annotations

try:
    import pydantic_ai as _pydantic_ai  # noqa: F401
except ImportError as error:
    raise ImportError(
        'branching.agent.acorn needs its extra: pip install ".[agent]" in the source tree'
    ) from error

from branching.agent.acorn.errors import BranchError
from branching.agent.acorn.module import Module
from branching.agent.acorn.tools import tool

__all__ = ["BranchError", "Module", "tool"]
