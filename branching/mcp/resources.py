"""Resources for long texts: the patch of a branch, and the output of a command."""

from __future__ import annotations

from functools import partial
from typing import Any

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ResourceError, ResourceNotFoundError
from mcp_types import InputRequiredResult

from branching.errors import BranchingError, BranchNotFoundError
from branching.fs.confined_dir import ConfinedDir
from branching.mcp.errors import words
from branching.mcp.roots import session_for_resource
from branching.mcp.tools import patch_text
from branching.mcp.worker_threads import run_short
from branching.runlog.run_log import read_entries

RESOURCE_BYTES_MAX = 2 << 20
"""Of a patch the beginning is given, of a log the end."""


def add_resources(server: MCPServer[Any]) -> None:
    """Registers all resources."""
    server.resource(
        "branching://branches/{name}/diff",
        name="diff",
        title="What a branch changed",
        description="The changes of an open branch against its parent, as a patch for git apply.",
        mime_type="text/x-diff",
    )(_diff)
    server.resource(
        "branching://logs/{name}",
        name="log",
        title="What a command printed",
        description="The whole output of a command or of a candidate, also of branches that are "
        "gone. Tools name it in the field `log`.",
        mime_type="text/plain",
    )(_log)


async def _diff(name: str, ctx: Context) -> str | InputRequiredResult:
    session = await session_for_resource(ctx)
    if isinstance(session, InputRequiredResult):
        return session
    try:
        branch = await session.find(name)
        text, is_cut = await run_short(partial(patch_text, branch, RESOURCE_BYTES_MAX))
    except BranchNotFoundError as error:
        raise ResourceNotFoundError(words(error)) from error
    except BranchingError as error:
        raise ResourceError(words(error)) from error
    return text + (f"\n[cut off after {RESOURCE_BYTES_MAX} bytes]\n" if is_cut else "")


async def _log(name: str, ctx: Context) -> str | InputRequiredResult:
    session = await session_for_resource(ctx)
    if isinstance(session, InputRequiredResult):
        return session
    store = session.workspace.store
    if store is None:
        raise ResourceError(
            "this workspace keeps no logs: its store cannot be seen from here\nNext: tell the user"
        )
    logs = store / "logs"
    if name not in {entry.branch for entry in await run_short(partial(read_entries, logs))}:
        raise ResourceNotFoundError(
            f"no output is kept under {name!r}: the newest 200 are kept\n"
            "Next: read a name that a tool has returned in the field log"
        )
    tree = ConfinedDir(logs, session.workspace.owner)
    _, size = await run_short(partial(tree.read, f"{name}.log", limit=0))
    begin = max(0, size - RESOURCE_BYTES_MAX)
    data, _ = await run_short(
        partial(tree.read, f"{name}.log", offset=begin, limit=RESOURCE_BYTES_MAX)
    )
    left_out = f"[{begin} bytes left out]\n" if begin else ""
    return left_out + data.decode("utf-8", "replace")
