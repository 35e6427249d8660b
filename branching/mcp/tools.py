"""The tools for branches, and the table of all tools.

A tool's docstring and the descriptions of its parameters are what a model reads.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from mcp.server.mcpserver import Context, MCPServer
from mcp_types import Tool, ToolAnnotations
from pydantic import Field

from branching.fs import Branch
from branching.mcp import commands, progress
from branching.mcp.answers import (
    Branches,
    BranchInfo,
    Changes,
    CommandResult,
    CommitInfo,
    History,
    Reverted,
)
from branching.mcp.commands import seconds_for
from branching.mcp.desk import MAIN
from branching.mcp.file_tools import branch_files, branch_read, branch_write
from branching.mcp.parameters import BranchName, Command, Globs, Parent, Seconds
from branching.mcp.race_tools import best_of_n, speculate
from branching.mcp.roots import AllowedDesk
from branching.mcp.tool import StrictTool
from branching.mcp.work import step

PATCH_BYTES_MAX = 12 << 10
"""In an answer; the resource of the diff has more."""


async def branch_list(desk: AllowedDesk) -> Branches:
    """List the open branches of the workspace, the oldest first."""
    records = await desk.branches()
    return Branches(
        workspace=str(desk.workspace.seen_at),
        policy=desk.workspace.policy,
        branches=[BranchInfo.of(each, kept=not desk.is_ours(each)) for each in records],
    )


async def branch_create(
    desk: AllowedDesk,
    name: Annotated[str | None, Field(description="Default: one that nobody has")] = None,
    parent: Parent = MAIN,
) -> BranchInfo:
    """Fork a copy-on-write branch of the workspace: it sees all files, and changes none of them
    until it is committed. It costs nothing. While a branch has open children it is frozen.
    """
    branch = await desk.create(name, parent)
    return BranchInfo.of(await step(branch.inspect), kept=False)


async def branch_run(
    desk: AllowedDesk,
    ctx: Context,
    branch: BranchName,
    command: Command,
    timeout_seconds: Seconds = None,
) -> CommandResult:
    """Run a shell command in a branch, and leave the branch open with what it changed. It ends
    with all processes it started. Nothing is committed, whatever the exit code.
    """
    async with progress.told(ctx) as tell:
        seconds = seconds_for(desk, timeout_seconds)
        ran = await commands.run(desk, branch, command, seconds=seconds, tell=tell)
    return CommandResult.of(branch, ran)


async def branch_diff(
    desk: AllowedDesk,
    branch: BranchName,
    patch: Annotated[bool, Field(description="Also the lines, as a patch")] = False,
) -> Changes:
    """Show what a branch changed against its parent: what a commit would apply."""
    found = await desk.find(branch)
    changes = await step(found.diff)
    text, is_cut = (
        await step(partial(patch_text, found, PATCH_BYTES_MAX, with_binary=False))
        if patch
        else (None, False)
    )
    return Changes.of(branch, changes, patch=text, truncated=is_cut)


async def branch_commit(
    desk: AllowedDesk,
    branch: BranchName,
    only: Globs = [],  # noqa: B006  (it is read, never changed; the schema shows it)
    exclude: Globs = [],  # noqa: B006
    force: Annotated[
        bool, Field(description="Overwrite what others changed meanwhile in the same paths")
    ] = False,
    skip: Annotated[bool, Field(description="Leave such paths as the others made them")] = False,
    dry_run: Annotated[bool, Field(description="Only tell what would be done")] = False,
) -> Changes:
    """Apply a branch to its parent, all or nothing, and close it. Its siblings are then stale
    (policy first-winner). `undo` takes a commit to the workspace back.
    """
    changes = await desk.commit(
        branch, only=only, exclude=exclude, force=force, skip=skip, dry_run=dry_run
    )
    return Changes.of(branch, changes, action="none" if dry_run else "committed")


async def branch_abort(desk: AllowedDesk, branch: BranchName) -> Changes:
    """Drop a branch with all it holds and its children; what runs in it is ended first. Its parent
    is untouched.
    """
    await desk.abort(branch)
    return Changes.of(branch, [], action="aborted")


async def branch_keep(desk: AllowedDesk, branch: BranchName) -> Changes:
    """Keep a branch open when this server ends, for the user to look at: otherwise the branches
    that were made through it are dropped then.
    """
    await desk.keep(branch)
    changes = await step((await desk.find(branch)).diff)
    return Changes.of(branch, changes, action="kept")


async def history(desk: AllowedDesk) -> History:
    """List the commits to the workspace that can be undone or redone, the oldest first."""
    records = await step(desk.workspace.history)
    return History(commits=[CommitInfo.of(record) for record in records])


async def undo(
    desk: AllowedDesk,
    dry_run: Annotated[bool, Field(description="Only tell what would be done")] = False,
    force: Annotated[
        bool,
        Field(description="Also where others changed the same paths since, or branches are open"),
    ] = False,
) -> Reverted:
    """Take the last commit to the workspace back, all or nothing; again, the one before. `redo`
    makes it again.
    """
    reversal = await step(partial(desk.workspace.undo, force=force, dry_run=dry_run))
    return Reverted.of(reversal, done=not dry_run)


async def redo(
    desk: AllowedDesk,
    dry_run: Annotated[bool, Field(description="Only tell what would be done")] = False,
    force: Annotated[
        bool,
        Field(description="Also where others changed the same paths since, or branches are open"),
    ] = False,
) -> Reverted:
    """Make the commit that was undone last again."""
    reversal = await step(partial(desk.workspace.redo, force=force, dry_run=dry_run))
    return Reverted.of(reversal, done=not dry_run)


_READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
_ADDS = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)
_RUNS = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=True)
_COMMITS = ToolAnnotations(read_only_hint=False, destructive_hint=True, open_world_hint=False)

_TOOLS: tuple[tuple[Callable[..., Any], str, ToolAnnotations], ...] = (
    (branch_list, "List branches", _READS),
    (branch_create, "Make a branch", _ADDS),
    (branch_run, "Run a command in a branch", _RUNS),
    (branch_read, "Read a file of a branch", _READS),
    (branch_write, "Write a file in a branch", _ADDS.model_copy(update={"idempotent_hint": True})),
    (branch_files, "List files of a branch", _READS),
    (branch_diff, "Show what a branch changed", _READS),
    (branch_commit, "Commit a branch", _COMMITS),
    (branch_abort, "Drop a branch", _COMMITS.model_copy(update={"idempotent_hint": True})),
    (branch_keep, "Keep a branch", _ADDS.model_copy(update={"idempotent_hint": True})),
    (speculate, "Race commands", _COMMITS.model_copy(update={"open_world_hint": True})),
    (best_of_n, "Best of several commands", _COMMITS.model_copy(update={"open_world_hint": True})),
    (history, "List commits", _READS),
    (undo, "Undo the last commit", _COMMITS),
    (redo, "Redo a commit", _COMMITS),
)


def make_tools() -> list[StrictTool]:
    """Returns all tools."""
    return [StrictTool.of(function, title, hints) for function, title, hints in _TOOLS]


async def registered_tools() -> list[Tool]:
    """Returns the tools as a client lists them, for the manual."""
    server: MCPServer[Any] = MCPServer("branching", tools=[*make_tools()])
    return await server.list_tools()


def patch_text(branch: Branch, bytes_max: int, *, with_binary: bool = True) -> tuple[str, bool]:
    """Returns a branch's patch and whether it is cut off.

    Args:
        branch: The branch whose changes the patch shows.
        bytes_max: The length at which the patch is cut off.
        with_binary: Whether to show the content of binary files, as git does in base85. Without
            it a comment takes the place of the content, and the patch cannot be applied.
    """
    with tempfile.TemporaryFile() as file:
        branch.patch(file)
        file.seek(0)
        kept = bytearray()
        is_binary = False
        for line in file:
            if line == b"GIT binary patch\n" and not with_binary:
                is_binary = True
                line = b"# binary content left out\n"  # noqa: PLW2901
            elif is_binary and not line.startswith(b"diff --git "):
                continue
            else:
                is_binary = False
            kept += line
            if len(kept) > bytes_max:
                break
    return bytes(kept[:bytes_max]).decode("utf-8", "replace"), len(kept) > bytes_max
