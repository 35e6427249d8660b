"""The tools of the Python session."""

from __future__ import annotations

from typing import Annotated

from mcp.server.mcpserver import Context
from pydantic import Field

from branching.mcp import progress, python_session
from branching.mcp.execution import seconds_for
from branching.mcp.models import CellResult, Changes, SessionInfo
from branching.mcp.parameters import COMMAND_CHARACTERS_MAX, Seconds
from branching.mcp.roots import AllowedSession
from branching.session.session import CHILDREN_MAX


async def session_run(
    session: AllowedSession,
    ctx: Context,
    code: Annotated[
        str,
        Field(
            min_length=1,
            max_length=COMMAND_CHARACTERS_MAX,
            description="Python code. The value of its last line is in the answer",
        ),
    ],
    child: Annotated[
        int | None,
        Field(ge=0, description="Number of a child, after session_fork. Omit it before"),
    ] = None,
    timeout_seconds: Seconds = None,
) -> CellResult:
    """Run Python code in a session that keeps its variables, open files and imports from call to
    call, and starts with the first call. It works in a branch of the workspace: files that it
    writes reach the workspace by session_end and branch_commit.
    """
    async with progress.report_progress(ctx):
        seconds = seconds_for(session, timeout_seconds)
        live = await python_session.started(session)
        cell = await live.run(code, child, seconds)
    return CellResult.of(cell, child=child)


async def session_fork(
    session: AllowedSession,
    n: Annotated[int, Field(ge=1, le=CHILDREN_MAX, description="How many children")],
) -> SessionInfo:
    """Fork the session into children that have its variables, open files and files, each with
    copies of its own. It takes milliseconds and copies no data. Try something different in each
    with session_run, then call session_pick.
    """
    live = python_session.running(session)
    await live.fork(n)
    return SessionInfo.of(live)


async def session_pick(
    session: AllowedSession,
    child: Annotated[
        int | None,
        Field(ge=0, description="Number of the child that continues. null drops all children"),
    ],
) -> Changes:
    """Make a child the session: its variables, its open files and its files. The other children
    are dropped. The answer lists what it changed in the files of the session.
    """
    live = python_session.running(session)
    changes = await live.pick(child)
    return Changes.of(live.branch.name, changes)


async def session_end(session: AllowedSession) -> Changes:
    """End the session and its children. Its files are in an open branch then, which the answer
    names: commit it with branch_commit, or drop it with branch_abort.
    """
    branch = await python_session.running(session).end()
    return Changes.of(branch.name, branch.diff(), action="kept")
