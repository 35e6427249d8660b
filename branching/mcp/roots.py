"""Roots: the directories that a client lets servers work in.

A client that gives none leaves it to the user who started the server. One that gives some must
have given the workspace, or a directory around it; nothing is done for it otherwise.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, cast
from urllib.parse import unquote, urlsplit

from mcp.server.mcpserver import Context, ListRoots, Resolve
from mcp.server.mcpserver.exceptions import ResourceError, ToolError
from mcp_types import InputRequiredResult, ListRootsRequest, ListRootsResult

from branching.mcp.workspace_session import WorkspaceSession

_QUESTION = "roots"


def _gives_roots(ctx: Context) -> bool:
    capabilities = ctx.client_capabilities
    return capabilities is not None and capabilities.roots is not None


def _client_roots(ctx: Context) -> ListRootsResult | ListRoots:
    return ListRoots() if _gives_roots(ctx) else ListRootsResult(roots=[])


def _desk_within(
    ctx: Context, roots: Annotated[ListRootsResult, Resolve(_client_roots)]
) -> WorkspaceSession:
    desk = session_of(ctx)
    if refusal := _refusal(desk, roots):
        raise ToolError(refusal)
    return desk


AllowedDesk = Annotated[WorkspaceSession, Resolve(_desk_within)]
"""A tool's parameter: the desk, if the client's roots let it be worked on."""


def session_of(ctx: Context) -> WorkspaceSession:
    """Returns the desk of the server, whatever the roots."""
    return cast(WorkspaceSession, ctx.request_context.lifespan_context)


async def session_for_resource(ctx: Context) -> WorkspaceSession | InputRequiredResult:
    """Does for a resource what `AllowedDesk` does for a tool, or returns what to ask first."""
    desk = session_of(ctx)
    if not _gives_roots(ctx):
        return desk
    if (ctx.protocol_version or "") >= "2026":  # questions travel with the answer
        answers = ctx.input_responses or {}
        if _QUESTION not in answers:
            return InputRequiredResult(input_requests={_QUESTION: ListRootsRequest()})
        roots = ListRootsResult.model_validate(answers[_QUESTION])
    else:
        roots = await ctx.session.send_request(ListRootsRequest(), ListRootsResult)
    if refusal := _refusal(desk, roots):
        raise ResourceError(refusal)
    return desk


def _refusal(desk: WorkspaceSession, roots: ListRootsResult) -> str | None:
    given = [path for root in roots.roots if (path := _path_of(str(root.uri)))]
    allowed = {*given, *(Path(os.path.realpath(path)) for path in given)}
    if not roots.roots or any(
        directory.is_relative_to(path) for path in allowed for directory in desk.directories
    ):
        return None
    names = ", ".join(str(path) for path in given) or "none of them a directory"
    return (
        f"the workspace {desk.directories[0]} is in none of the client's roots ({names}). "
        "Nothing was done.\nNext: tell the user to start the server on a directory in them "
        "(branching mcp -w DIR), or to add the directory to the client's roots"
    )


def _path_of(uri: str) -> Path | None:
    parts = urlsplit(uri)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        return None
    path = Path(unquote(parts.path))
    return path if path.is_absolute() and ".." not in path.parts else None
