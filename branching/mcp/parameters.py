"""Parameters that several tools have, with what a model is told of them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from branching.mcp.execution import SECONDS_DEFAULT

COMMAND_CHARACTERS_MAX = 32_000

BranchName = Annotated[
    str, Field(description="Name of an open branch, from branch_create or branch_list")
]
BranchOrMain = Annotated[
    str, Field(description='Name of an open branch; "main" is the workspace itself')
]
FilePath = Annotated[
    str, Field(description="Relative to the workspace; symbolic links are not followed")
]
Command = Annotated[
    str,
    Field(
        description="Run by sh, in a sandbox that sees the branch at the workspace's own path",
        min_length=1,
        max_length=COMMAND_CHARACTERS_MAX,
    ),
]
Seconds = Annotated[
    float | None,
    Field(
        gt=0,
        description=f"Kill the command after so many seconds. Default {SECONDS_DEFAULT:.0f}",
    ),
]
Globs = Annotated[list[str], Field(description="Globs of paths: src/**, *.md")]
"""Which paths a commit takes."""
DropRest = Annotated[
    bool,
    Field(description="Drop the changes that are not committed, and close the branch"),
]
Parent = Annotated[
    str,
    Field(
        description='Branch to copy from, and to commit back into. "main" is the workspace itself'
    ),
]
ForceReversal = Annotated[
    bool,
    Field(description="Also if the same files were changed since, or if branches are open"),
]
Setup = Annotated[
    str | None,
    Field(
        description="A command that is run once, before the candidates are forked: all start from "
        "what it made",
        max_length=COMMAND_CHARACTERS_MAX,
    ),
]
Commit = Annotated[
    bool,
    Field(
        description="Commit the winner immediately. By default its branch is left open, to review "
        "and commit with branch_commit"
    ),
]
CommandId = Annotated[str, Field(description="Id of the command, from branch_start")]
