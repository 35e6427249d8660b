"""Agents in the style of Acorn: classes with tools and branches. Requires the extra `agent`.

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

The model of `Author` has a tool `branch` that starts a `Reviewer`, with a copy of the conversation,
the tools of all levels above, and, in a workspace, its own files. `merge` determines how the result
is reported to the parent. Code calls `self.branch(Reviewer, path=...)`.

    Module        an agent; a subclass defines it, an instance runs
    tool          makes a method a tool
    BranchError   a branch that was started by code has failed

It is based on the coordinator: a branch is a fork with one branch, its budget, files and merge.
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
