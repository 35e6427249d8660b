"""Branches as tools of an agent, whatever its maker: a server of the Model Context Protocol.

    client ── stdio | http ── tools, resources ── desk ── branching

`workspace_session` holds what one server works on and knows no protocol; `tools` and `resources`
say it in the protocol's words; `stdio_transport` and `http_transport` carry it. Needs the extra
`mcp`: the library does not.
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
