"""The tools for branches, and the table of all tools.

A tool's docstring and the descriptions of its parameters are what a model reads.
"""

from __future__ import annotations

import codecs
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import Annotated, Any

from mcp.server.mcpserver import Context, MCPServer
from mcp_types import Tool, ToolAnnotations
from pydantic import Field

from branching.fs import Branch, BranchRecord
from branching.mcp import background, execution, progress
from branching.mcp.execution import seconds_for
from branching.mcp.file_tools import branch_edit, branch_files, branch_read, branch_write
from branching.mcp.models import (
    BRANCHES_MAX,
    BackgroundCommand,
    Branches,
    BranchInfo,
    Changes,
    CommandResult,
    CommitInfo,
    History,
    Reverted,
)
from branching.mcp.parameters import (
    BranchName,
    Command,
    CommandId,
    DropRest,
    ForceReversal,
    Globs,
    Parent,
    Seconds,
)
from branching.mcp.race_tools import branch_best_of_n, branch_speculate
from branching.mcp.roots import AllowedSession
from branching.mcp.session_tools import session_end, session_fork, session_pick, session_run
from branching.mcp.strict_tool import StrictTool
from branching.mcp.worker_threads import run_short
from branching.mcp.workspace_session import MAIN, WorkspaceSession
from branching.process.sandbox.masked_files import glob_pattern

PATCH_BYTES_MAX = 12 << 10
"""In an answer; the resource of the diff has more."""
WAIT_SECONDS_MAX = 600.0


async def branch_list(session: AllowedSession) -> Branches:
    """List the open branches of the workspace, the oldest first."""
    records = await session.branches()
    return Branches(
        workspace=str(session.workspace.seen_at),
        policy=session.workspace.policy,
        branches=[_info(session, each) for each in records[-BRANCHES_MAX:]],
        left_out=max(0, len(records) - BRANCHES_MAX),
    )


async def branch_create(
    session: AllowedSession,
    name: Annotated[
        str | None,
        Field(
            description='Name of the new branch, for example "fix-login". Omit it to get a '
            "generated name"
        ),
    ] = None,
    parent: Parent = MAIN,
) -> BranchInfo:
    """Create an isolated copy of the workspace: copy-on-write, immediate, including ignored files.
    Edit and run commands in it with the other branch_ tools, or use its `path` as a directory; the
    workspace does not change until branch_commit. A branch that has open child branches is
    read-only.
    """
    branch = await session.create(name, parent)
    return _info(session, await run_short(branch.inspect))


async def branch_run(
    session: AllowedSession,
    ctx: Context,
    branch: BranchName,
    command: Command,
    timeout_seconds: Seconds = None,
) -> CommandResult:
    """Run a shell command inside a branch and wait for it. Background processes are killed when it
    returns: start a server with branch_start, or start and test it in one command. File changes
    stay in the branch; nothing is committed.
    """
    async with progress.report_progress(ctx) as tell:
        seconds = seconds_for(session, timeout_seconds)
        ran = await execution.run(session, branch, command, seconds=seconds, tell=tell)
    return CommandResult.of(branch, ran)


async def branch_start(
    session: AllowedSession,
    branch: BranchName,
    command: Command,
    timeout_seconds: Annotated[
        float | None,
        Field(
            gt=0,
            description="Kill the command after so many seconds. Default: the longest time that "
            "this server allows",
        ),
    ] = None,
) -> BackgroundCommand:
    """Start a shell command inside a branch, and leave it running in the background: a development
    server, a watcher. It has ten ports of its own, from $BRANCHING_PORT_BASE on. Read its output
    with branch_output and end it with branch_stop. The branch cannot be committed while it runs.
    """
    seconds = seconds_for(session, timeout_seconds or session.rules.seconds_max)
    started = await background.start(session, branch, command, seconds=seconds)
    return BackgroundCommand.of(started, reachable=session.rules.network)


async def branch_output(
    session: AllowedSession,
    id: CommandId,  # noqa: A002  (the name that a model sees)
    wait_seconds: Annotated[
        float,
        Field(ge=0, le=WAIT_SECONDS_MAX, description="Wait so long for the end of the command"),
    ] = 0,
    until: Annotated[
        str, Field(description='Do not wait longer once the output has this text: "listening"')
    ] = "",
) -> BackgroundCommand:
    """Show whether a command in the background runs, and what it has printed so far."""
    started = background.find(session, id)
    await background.wait(started, wait_seconds, lambda text: bool(until) and until in text)
    return BackgroundCommand.of(started, reachable=session.rules.network)


async def branch_stop(session: AllowedSession, id: CommandId) -> BackgroundCommand:  # noqa: A002
    """End a command in the background with all processes it started. Its changes of files stay in
    the branch.
    """
    started = background.find(session, id)
    await background.stop(started)
    return BackgroundCommand.of(started, reachable=session.rules.network)


async def branch_diff(
    session: AllowedSession,
    branch: BranchName,
    paths: Annotated[
        list[str],
        Field(
            description="Show only changes of these paths: globs, and directories with all in "
            "them. Default: all"
        ),
    ] = [],  # noqa: B006
    patch: Annotated[
        bool, Field(description="Also show the changed lines of text files, as a patch")
    ] = False,
) -> Changes:
    """Show what a branch changed against its parent: what branch_commit would apply. Works for a
    stale branch, too.
    """
    found = await session.find(branch)
    chosen = selection(paths) if paths else None
    changes = [
        each
        for each in await run_short(found.diff)
        if chosen is None or chosen(each.path) or (each.origin and chosen(each.origin))
    ]
    text, is_cut = (
        await run_short(
            partial(patch_text, found, PATCH_BYTES_MAX, with_binary=False, chosen=chosen)
        )
        if patch
        else (None, False)
    )
    return Changes.of(branch, changes, patch=text, truncated=is_cut)


async def branch_commit(
    session: AllowedSession,
    branch: BranchName,
    only: Globs = [],  # noqa: B006  (it is read, never changed; the schema shows it)
    exclude: Globs = [],  # noqa: B006
    drop_rest: DropRest = False,
    force: Annotated[
        bool,
        Field(
            description="Where a file was also changed in the workspace since the branch was "
            "created, keep the branch's version. Without force or skip the commit is refused and "
            "lists these files"
        ),
    ] = False,
    skip: Annotated[
        bool,
        Field(
            description="Leave the workspace's version of such files as it is, and commit all "
            "others; the branch stays open with its own version"
        ),
    ] = False,
    dry_run: Annotated[bool, Field(description="Only show what would be committed")] = False,
) -> Changes:
    """Apply all changes of a branch to its parent (normally the workspace) in one atomic step, and
    close the branch. With only, exclude or skip it stays open with the changes that were not
    committed; their number is in `remaining`. Other branches stay open. A stale branch is rebased
    onto the workspace first. Review with branch_diff before; revert with branch_undo and the id
    in `commit`.
    """
    if force and skip:
        raise ValueError("force keeps the branch's version and skip the workspace's: give one")
    changes, remaining = await session.commit(
        branch,
        only=only,
        exclude=exclude,
        drop_rest=drop_rest,
        force=force,
        skip=skip,
        dry_run=dry_run,
    )
    answer = Changes.of(branch, changes, action="none" if dry_run else "committed")
    answer.remaining = remaining
    if changes and not dry_run:
        answer.commit = await session.last_commit(branch)
    return answer


async def branch_rebase(
    session: AllowedSession,
    branch: BranchName,
    force: Annotated[
        bool, Field(description="Keep the branch's version of files that both sides changed")
    ] = False,
) -> BranchInfo:
    """Put the changes of a branch on top of the present state of its parent: the branch then shows
    what was committed since it was created, and a stale branch is live again. Files that both
    sides changed are listed, and nothing is changed without force.
    """
    await session.rebase(branch, force=force)
    return _info(session, await run_short((await session.find(branch)).inspect))


async def branch_abort(session: AllowedSession, branch: BranchName) -> Changes:
    """Delete a branch with all its changes and its child branches; commands that run in it are
    killed first. The parent is not changed. The answer lists what was dropped.
    """
    changes = await session.abort(branch)
    return Changes.of(branch, changes, action="aborted")


async def branch_keep(session: AllowedSession, branch: BranchName) -> Changes:
    """Keep a branch open when this server ends, so that the user can review it and commit it with
    `branching commit NAME`. Other branches that were created through this server are deleted when
    it ends.
    """
    await session.keep(branch)
    changes = await run_short((await session.find(branch)).diff)
    return Changes.of(branch, changes, action="kept")


async def branch_history(session: AllowedSession) -> History:
    """List the commits to the workspace that can be undone or redone, the oldest first."""
    records = await run_short(session.workspace.history)
    return History(commits=[CommitInfo.of(record) for record in records])


async def branch_undo(
    session: AllowedSession,
    commit: Annotated[
        int | None,
        Field(
            description="Id of the commit to revert, from branch_commit or branch_history. The "
            "call is refused if another commit is the last one. Omit it to revert the last commit, "
            "whoever made it"
        ),
    ] = None,
    dry_run: Annotated[bool, Field(description="Only show what would change")] = False,
    force: ForceReversal = False,
) -> Reverted:
    """Revert the most recent commit to the workspace, in one atomic step. Call again for the one
    before. This does not revert edits inside a branch.
    """
    reversal = await session.undo(commit, force=force, dry_run=dry_run)
    return Reverted.of(reversal, done=not dry_run)


async def branch_redo(
    session: AllowedSession,
    dry_run: Annotated[bool, Field(description="Only show what would change")] = False,
    force: ForceReversal = False,
) -> Reverted:
    """Apply the commit again that was reverted last."""
    reversal = await run_short(partial(session.workspace.redo, force=force, dry_run=dry_run))
    return Reverted.of(reversal, done=not dry_run)


_READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
_ADDS = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)
_RUNS = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=True)
_COMMITS = ToolAnnotations(read_only_hint=False, destructive_hint=True, open_world_hint=False)

_DROPS = _COMMITS
_RACES = _COMMITS.model_copy(update={"open_world_hint": True})

_TOOLS: tuple[tuple[Callable[..., Any], str, ToolAnnotations], ...] = (
    (branch_list, "List branches", _READS),
    (branch_create, "Make a branch", _ADDS),
    (branch_run, "Run a command in a branch", _RUNS),
    (branch_start, "Start a command in the background", _RUNS),
    (branch_output, "Show the output of a command in the background", _READS),
    (branch_stop, "End a command in the background", _ADDS),
    (branch_read, "Read a file of a branch", _READS),
    (branch_write, "Write a file in a branch", _ADDS.model_copy(update={"idempotent_hint": True})),
    (branch_edit, "Replace a text in a file of a branch", _ADDS),
    (branch_files, "List files of a branch", _READS),
    (branch_diff, "Show what a branch changed", _READS),
    (branch_commit, "Commit a branch", _COMMITS),
    (branch_rebase, "Rebase a branch", _ADDS),
    (branch_abort, "Drop a branch", _COMMITS.model_copy(update={"idempotent_hint": True})),
    (branch_keep, "Keep a branch", _ADDS.model_copy(update={"idempotent_hint": True})),
    (branch_speculate, "Race commands", _RACES),
    (branch_best_of_n, "Best of several commands", _RACES),
    (session_run, "Run Python in the session", _RUNS),
    (session_fork, "Fork the session", _ADDS),
    (session_pick, "Pick a child of the session", _DROPS),
    (session_end, "End the session", _DROPS),
    (branch_history, "List commits", _READS),
    (branch_undo, "Revert the last commit", _COMMITS),
    (branch_redo, "Apply a reverted commit again", _COMMITS),
)
_COMMITTING = (branch_commit, branch_undo, branch_redo)
"""What only the user does where an agent proposes."""
OLD_NAMES = {
    "speculate": "branch_speculate",
    "best_of_n": "branch_best_of_n",
    "history": "branch_history",
    "undo": "branch_undo",
    "redo": "branch_redo",
}
"""Names of tools in the first version, which can still be called; they are not listed."""


def make_tools(*, propose: bool = False) -> list[StrictTool]:
    """Returns all tools; with `propose`, those of an agent that cannot commit."""
    return [
        StrictTool.of(function, title, hints)
        for function, title, hints in _TOOLS
        if not (propose and function in _COMMITTING)
    ]


async def registered_tools() -> list[Tool]:
    """Returns the tools as a client lists them, for the manual."""
    server: MCPServer[Any] = MCPServer("branching", tools=[*make_tools()])
    return await server.list_tools()


def _info(session: WorkspaceSession, record: BranchRecord) -> BranchInfo:
    running = session.background_of(record.name)
    return BranchInfo.of(record, kept=session.is_kept(record), running=running)


def selection(globs: Sequence[str]) -> Callable[[str], bool]:
    """Returns whether a path is one of those asked for, or lies below one.

    A glob without a slash is a name in any directory, one with a slash a path from the root.
    """
    patterns = [
        glob_pattern(trimmed.removeprefix("/") if "/" in trimmed else f"**/{trimmed}")
        for trimmed in (glob.rstrip("/") for glob in globs)
    ]

    def is_chosen(path: str) -> bool:
        whole = PurePosixPath(path)
        return any(
            pattern.fullmatch(str(part)) for part in (whole, *whole.parents) for pattern in patterns
        )

    return is_chosen


def patch_text(
    branch: Branch,
    bytes_max: int,
    *,
    with_binary: bool = True,
    chosen: Callable[[str], bool] | None = None,
) -> tuple[str, bool]:
    """Returns a branch's patch and whether it is cut off.

    Args:
        branch: The branch whose changes the patch shows.
        bytes_max: The length at which the patch is cut off.
        with_binary: Whether to show the content of binary files, as git does in base85. Without
            it a comment takes the place of the content, and the patch cannot be applied.
        chosen: Whether to show the changes of a path. Default: of all.
    """
    with tempfile.TemporaryFile() as file:
        branch.patch(file)
        file.seek(0)
        kept = bytearray()
        is_binary = False
        is_shown = True
        for line in file:
            if line.startswith(b"diff --git ") and chosen is not None:
                is_shown = chosen(_path_of(line))
            if not is_shown:
                continue
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


def _path_of(header: bytes) -> str:
    """Returns the new path in the first line of a file's part of a patch."""
    line = header.rstrip(b"\n")
    if line.endswith(b'"'):  # git quotes such a name, with escapes of C
        quoted = line[line.rindex(b' "b/') + 2 : -1]
        line, _ = codecs.escape_decode(quoted)
        return os.fsdecode(line[2:])
    # `a/PATH b/PATH`, or the paths of a rename: of equal ones the half is one.
    words = line.removeprefix(b"diff --git ")
    half = words[len(words) // 2 + 1 :]
    if words == b"a/" + half[2:] + b" " + half:
        return os.fsdecode(half[2:])
    return os.fsdecode(words[words.rindex(b" b/") + 3 :])
