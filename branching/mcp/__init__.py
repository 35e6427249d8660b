"""A server of the Model Context Protocol, with branches as tools for agents.

    client ── stdio | http ── tools, resources ── WorkspaceSession ── branching

`workspace_session` has the state of one server and does not depend on the protocol. `tools` and
`resources` define the protocol's tools and resources. `stdio_transport` and `http_transport` are
the transports. Requires the extra `mcp`.
"""

from __future__ import annotations

try:
    import mcp  # noqa: F401
except ImportError as error:
    raise ImportError(
        'branching.mcp needs its extra: pip install ".[mcp]" in the source tree', name="mcp"
    ) from error

from branching.mcp.http_transport import serve_http
from branching.mcp.server import make_server
from branching.mcp.stdio_transport import serve_stdio
from branching.mcp.workspace_session import Rules, WorkspaceSession

__all__ = ["Rules", "WorkspaceSession", "make_server", "serve_http", "serve_stdio"]
