"""The server: a session with the tools and resources that use it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from mcp.server.auth.provider import TokenVerifier
from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS

from branching import __version__
from branching._caller import for_caller
from branching.mcp.errors import no_such, refused_arguments
from branching.mcp.prompts import add_prompts
from branching.mcp.resources import add_resources
from branching.mcp.tools import OLD_NAMES, make_tools
from branching.mcp.workspace_session import WorkspaceSession

_ABOUT = """\
Copy-on-write branches of one directory, the workspace. A branch shows all of its files and takes no
time to create; a change in it reaches the workspace only by a commit, in one atomic step.

"""
_SEVERAL = """\
To try several ways concurrently: branch_speculate (the first success wins) or branch_best_of_n (the
best score wins), with candidates that end with the check that decides ("... && make test"). The
winner's branch is left open.
"""
INSTRUCTIONS = f"""\
{_ABOUT}To try one thing: branch_create, then branch_edit, branch_write and branch_run in the
branch, then branch_diff, then branch_commit or branch_abort.
{_SEVERAL}To keep data in memory: session_run keeps Python variables from call
to call, session_fork copies them with all files into children, session_pick goes on with one.
Branches that changed different files can all be committed; where two changed the same
file the second commit is refused and lists it. branch_undo reverts a commit by its id.
Branches that are left open are deleted when the server ends, unless branch_keep kept them.
"""
PROPOSING = f"""\
{_ABOUT}This server proposes changes; only the user commits them. To propose one: branch_create,
then branch_edit, branch_write and branch_run in the branch, then branch_diff; then tell the user
what you changed, and to run `branching diff NAME` and `branching commit NAME`.
{_SEVERAL}Delete with branch_abort what you do not propose. Branches that have changes stay open
when the server ends.
"""


class _Server(MCPServer[WorkspaceSession]):
    """Also knows the tools by the names that they had in the first version."""

    async def call_tool(self, name: str, *rest: Any, **options: Any) -> Any:
        name = OLD_NAMES.get(name, name)
        names = [tool.name for tool in await self.list_tools()]
        if name not in names:
            raise ToolError(no_such("tool", name, names))
        return await super().call_tool(name, *rest, **options)

    async def get_prompt(
        self, name: str, arguments: dict[str, Any] | None = None, *rest: Any, **options: Any
    ) -> Any:
        prompts = {prompt.name: prompt for prompt in await self.list_prompts()}
        if name not in prompts:
            raise MCPError(INVALID_PARAMS, no_such("prompt", name, list(prompts)))
        known = prompts[name].arguments or []
        given = arguments or {}
        faults = [
            f"the argument {each.name!r} is missing"
            for each in known
            if each.required and not given.get(each.name)
        ]
        faults += [
            f"there is no argument {each!r}"
            for each in given
            if each not in {argument.name for argument in known}
        ]
        if faults:
            accepted = {each.name: bool(each.required) for each in known}
            raise MCPError(INVALID_PARAMS, refused_arguments(name, faults, accepted))
        return await super().get_prompt(name, arguments, *rest, **options)


def make_server(
    session: WorkspaceSession,
    *,
    verifier: TokenVerifier | None = None,
    auth: AuthSettings | None = None,
) -> MCPServer[WorkspaceSession]:
    """Returns a server that ends the session when it ends."""

    @asynccontextmanager
    async def lifespan(_: MCPServer[WorkspaceSession]) -> AsyncIterator[WorkspaceSession]:
        async with session:
            yield session

    # What a tool says to its model is no news for the terminal; a fault of ours is.
    logging.basicConfig(format="branching mcp: %(message)s", level=logging.WARNING)
    propose = session.rules.propose
    server = _Server(
        "branching",
        title="Branches of a directory",
        version=__version__,
        instructions=for_caller(PROPOSING) if propose else INSTRUCTIONS,
        tools=[*make_tools(propose=propose)],
        log_level="WARNING",
        lifespan=lifespan,
        token_verifier=verifier,
        auth=auth,
    )
    add_resources(server)
    add_prompts(server, propose=propose)
    return server
