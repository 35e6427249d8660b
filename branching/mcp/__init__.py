"""Branches as tools of an agent, whatever its maker: a server of the Model Context Protocol.

    client ── stdio | http ── tools, resources ── desk ── branching

`desk` holds what one server works on and knows no protocol; `tools` and `resources` say it in the
protocol's words; `stdio` and `http` carry it. Needs the extra `mcp`: the library does not.
"""

from __future__ import annotations

try:
    import mcp  # noqa: F401
except ImportError as error:
    raise ImportError(
        'branching.mcp needs its extra: pip install ".[mcp]" in the source tree', name="mcp"
    ) from error

from branching.mcp.desk import Desk, Rules
from branching.mcp.http import serve_http
from branching.mcp.server import make_server
from branching.mcp.stdio import serve_stdio

__all__ = ["Desk", "Rules", "make_server", "serve_http", "serve_stdio"]
