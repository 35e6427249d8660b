"""Prompts: tasks that a host offers to its user, as slash commands for example."""

from __future__ import annotations

from typing import Annotated, Any

from mcp.server.mcpserver import MCPServer
from pydantic import Field

from branching._caller import for_caller

_COMMIT = "Then call branch_commit with that branch"
_PROPOSE = "Do not commit. Tell me to run `branching diff NAME` and `branching commit NAME`"


def add_prompts(server: MCPServer[Any], *, propose: bool) -> None:
    """Registers all prompts; with `propose`, for an agent that cannot commit."""
    end = for_caller(_PROPOSE) if propose else _COMMIT

    @server.prompt(
        title="Try three ways",
        description="Solve a task in three different ways, each in its own branch, and choose one",
    )
    def try_three_ways(
        task: Annotated[str, Field(description="What is to be done")],
        check: Annotated[
            str, Field(description="A shell command that exits with 0 if it is done: make test")
        ],
    ) -> str:
        return f"""\
Solve this task in three clearly different ways: {task}

1. Create three branches with branch_create. Make one of the solutions in each, with branch_edit,
   branch_write and branch_run. Change nothing in the workspace itself.
2. Run the check in each branch with branch_run: {check}
3. Compare the branches that pass, with branch_diff and patch=true. Tell me in a few lines how they
   differ, and which one is best and why.
4. Delete the others with branch_abort. {end}. If no branch passes the check, commit none and tell
   me what is missing.
"""

    @server.prompt(
        title="Repair until the tests pass",
        description="Repair the project in a branch, until its tests pass",
    )
    def repair_until_tests_pass(
        tests: Annotated[str, Field(description="The shell command that runs the tests")],
        attempts: Annotated[str, Field(description="How often to try at most")] = "5",
    ) -> str:
        return f"""\
Repair the project so that its tests pass: {tests}

1. Create a branch with branch_create, and run the tests in it with branch_run.
2. Read what failed, and repair the cause in the branch, with branch_edit. Do not weaken, skip or
   delete tests. Run the tests again. Repeat this at most {attempts} times.
3. When they pass, show me branch_diff with patch=true. {end}.
4. If they still fail, keep the branch with branch_keep, and tell me what you found.
"""
