"""The server: a desk, with the tools and resources to use it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mcp.server.auth.provider import TokenVerifier
from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver import MCPServer

from branching import __version__
from branching.mcp.desk import Desk
from branching.mcp.resources import add_resources
from branching.mcp.tools import make_tools

INSTRUCTIONS = """\
Copy-on-write branches of one directory, the workspace. A branch sees all of its files and costs
nothing; what is done in it reaches the workspace only by a commit, all or nothing.

To try one thing: branch_create, branch_write and branch_run in it, branch_diff, then branch_commit
or branch_abort. To try several at once: speculate (the first success is committed) or best_of_n
(the best score), with candidates that end with the check that decides ("... && make test").
Branches that changed different files can all be committed; where two changed the same file the
second commit is refused and lists it. undo reverts a commit by its id.
Branches that are left open are dropped when the server ends, unless branch_keep kept them.
"""


def make_server(
    desk: Desk, *, verifier: TokenVerifier | None = None, auth: AuthSettings | None = None
) -> MCPServer[Desk]:
    """Returns a server whose end ends the desk."""

    @asynccontextmanager
    async def lifespan(_: MCPServer[Desk]) -> AsyncIterator[Desk]:
        async with desk:
            yield desk

    # What a tool says to its model is no news for the terminal; a fault of ours is.
    logging.basicConfig(format="branching mcp: %(message)s", level=logging.WARNING)
    server: MCPServer[Desk] = MCPServer(
        "branching",
        title="Branches of a directory",
        version=__version__,
        instructions=INSTRUCTIONS,
        tools=[*make_tools()],
        log_level="WARNING",
        lifespan=lifespan,
        token_verifier=verifier,
        auth=auth,
    )
    add_resources(server)
    return server
