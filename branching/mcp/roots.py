"""Roots: the directories in which a client allows servers to work.

If the client has no roots, the user who started the server decides. Otherwise a root must contain
the workspace, or every call is refused.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, cast
from urllib.parse import unquote, urlsplit

from mcp.server.mcpserver import Context, ListRoots, Resolve
from mcp.server.mcpserver.exceptions import ResourceError, ToolError
from mcp_types import InputRequiredResult, ListRootsRequest, ListRootsResult

from branching._caller import for_caller
from branching.mcp.workspace_session import WorkspaceSession

_QUESTION = "roots"


def _gives_roots(ctx: Context) -> bool:
    capabilities = ctx.client_capabilities
    return capabilities is not None and capabilities.roots is not None


def _client_roots(ctx: Context) -> ListRootsResult | ListRoots:
    return ListRoots() if _gives_roots(ctx) else ListRootsResult(roots=[])


def _session_within_roots(
    ctx: Context, roots: Annotated[ListRootsResult, Resolve(_client_roots)]
) -> WorkspaceSession:
    session = session_of(ctx)
    if refusal := _refusal(session, roots):
        raise ToolError(refusal)
    return session


AllowedSession = Annotated[WorkspaceSession, Resolve(_session_within_roots)]
"""Type of a tool's parameter: the session; the call fails if no root contains the workspace."""


def session_of(ctx: Context) -> WorkspaceSession:
    """Returns the server's session without checking the roots."""
    return cast(WorkspaceSession, ctx.request_context.lifespan_context)


async def session_for_resource(ctx: Context) -> WorkspaceSession | InputRequiredResult:
    """Returns the session for a resource, or an InputRequiredResult that asks for the roots."""
    session = session_of(ctx)
    if not _gives_roots(ctx):
        return session
    if (ctx.protocol_version or "") >= "2026":  # questions travel with the answer
        answers = ctx.input_responses or {}
        if _QUESTION not in answers:
            return InputRequiredResult(input_requests={_QUESTION: ListRootsRequest()})
        roots = ListRootsResult.model_validate(answers[_QUESTION])
    else:
        roots = await ctx.session.send_request(ListRootsRequest(), ListRootsResult)
    if refusal := _refusal(session, roots):
        raise ResourceError(refusal)
    return session


def _refusal(session: WorkspaceSession, roots: ListRootsResult) -> str | None:
    given = [path for root in roots.roots if (path := _path_of(str(root.uri)))]
    allowed = {*given, *(Path(os.path.realpath(path)) for path in given)}
    if not roots.roots or any(
        directory.is_relative_to(path) for path in allowed for directory in session.directories
    ):
        return None
    names = ", ".join(str(path) for path in given) or "none of them a directory"
    return for_caller(
        f"the workspace {session.directories[0]} is in none of the client's roots ({names}). "
        "Nothing was done.\nNext: tell the user to start the server on a directory in them "
        "(branching mcp -w DIR), or to add the directory to the client's roots"
    )


def _path_of(uri: str) -> Path | None:
    parts = urlsplit(uri)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        return None
    path = Path(unquote(parts.path))
    return path if path.is_absolute() and ".." not in path.parts else None
