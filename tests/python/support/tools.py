"""A client of the server of tools: the protocol's own library, as an agent has it."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import mcp.client.stdio
import mcp_types
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.session import ClientRequestContext
from mcp.server.mcpserver import MCPServer

from branching.mcp import Rules, WorkspaceSession, make_server

SECONDS_MAX = 200.0


class Agent:
    """A client, with what tests ask of it."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.heard: list[str] = []

    async def call(self, tool: str, **arguments: Any) -> Any:
        """Returns the structured answer of a tool that has to succeed."""
        answer = await self.client.call_tool(tool, arguments, progress_callback=self._hear)
        assert not answer.is_error, answer.content
        assert answer.structured_content is not None
        return answer.structured_content

    async def refused(self, tool: str, **arguments: Any) -> str:
        """Returns what a tool says that has to fail."""
        answer = await self.client.call_tool(tool, arguments)
        assert answer.is_error, answer.structured_content
        (content,) = answer.content
        assert isinstance(content, mcp_types.TextContent)
        return content.text

    async def text_of(self, uri: str) -> str:
        """Returns a resource."""
        (content,) = (await self.client.read_resource(uri)).contents
        assert isinstance(content, mcp_types.TextResourceContents)
        return content.text

    async def hears(self, text: str) -> None:
        """Waits for a progress notification with the text; these are sent beside the answers."""
        with anyio.fail_after(SECONDS_MAX):
            while not any(text in message for message in self.heard):
                await anyio.sleep(0.05)

    async def _hear(self, progress: float, total: float | None, message: str | None) -> None:
        self.heard.append(message or "")


@asynccontextmanager
async def connected(
    server: MCPServer[Any] | StdioServerParameters | Any,
    *,
    mode: str = "auto",
    roots: Sequence[Path] | None = None,
) -> AsyncIterator[Agent]:
    """Connects a client; with `roots` it is one that gives roots."""

    async def list_roots(
        context: ClientRequestContext,
    ) -> mcp_types.ListRootsResult | mcp_types.ErrorData:
        given = [mcp_types.Root(uri=path.as_uri()) for path in roots or ()]  # type: ignore[arg-type]
        return mcp_types.ListRootsResult(roots=given)

    async with Client(
        server,
        mode=mode,
        list_roots_callback=None if roots is None else list_roots,
        read_timeout_seconds=SECONDS_MAX,
    ) as client:
        yield Agent(client)


def served(workspace: Any, **rules: Any) -> MCPServer[WorkspaceSession]:
    """Returns a server in this process."""
    return make_server(WorkspaceSession(workspace, None, Rules(**rules)))


def over_stdio(
    directory: Path, *words: str, monkeypatch: pytest.MonkeyPatch | None = None
) -> StdioServerParameters:
    """Returns how a client starts `branching mcp` on a directory.

    The library kills a server that needs more than two seconds to end, which on a busy machine
    says nothing of the server: here it may take its time.
    """
    if monkeypatch is not None:
        monkeypatch.setattr(mcp.client.stdio, "PROCESS_TERMINATION_TIMEOUT", SECONDS_MAX)
    return StdioServerParameters(
        command=sys.executable,
        args=["-m", "branching", "mcp", "-w", str(directory), *words],
        env={"BRANCHFS": os.environ.get("BRANCHFS", "branchfs"), "TMPDIR": tempfile.gettempdir()},
        cwd=directory,
    )
