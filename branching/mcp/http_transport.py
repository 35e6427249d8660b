"""The server over streamable HTTP, for clients on this machine that have the token.

It listens on the loopback address only. It refuses requests with another Host header (DNS
rebinding), from another origin, or without the token.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import sys

import anyio
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.transport_security import TransportSecuritySettings
from pydantic import AnyHttpUrl

from branching._cancellation import CancelScope
from branching.mcp.disconnect import watched
from branching.mcp.server import make_server
from branching.mcp.workspace_session import WorkspaceSession

HOST = "127.0.0.1"
PATH = "/mcp"
STOP_SECONDS_MAX = 3
"""How long connections may take to close at the end of the server."""


def serve_http(session: WorkspaceSession, *, port: int, token: str | None) -> None:
    """Serves until the calling scope is cancelled.

    Prints the address on standard error, and a generated token.

    Args:
        session: The session.
        port: The port; 0 for a free one.
        token: The token. Default: a generated one.

    Raises:
        OSError: The port is in use.
    """
    import uvicorn

    shown = token or secrets.token_urlsafe(32)
    with socket.create_server((HOST, port)) as listening:
        port = listening.getsockname()[1]
        names = [f"{name}:{port}" for name in (HOST, "localhost")]
        origins = [f"http://{name}" for name in names]
        server = make_server(
            session,
            verifier=_OneToken(shown),
            auth=AuthSettings(issuer_url=AnyHttpUrl(origins[0]), resource_server_url=None),
        )
        app = server.streamable_http_app(
            streamable_http_path=PATH,
            transport_security=TransportSecuritySettings(
                allowed_hosts=names, allowed_origins=origins
            ),
        )
        config = uvicorn.Config(
            watched(app),
            log_level="warning",
            timeout_graceful_shutdown=STOP_SECONDS_MAX,
            lifespan="on",
        )
        serving = uvicorn.Server(config)
        scope = CancelScope.current()

        def end(_grace_seconds: float) -> None:
            serving.should_exit = True

        if scope is not None:
            scope.on_cancel(end)
        print(f"branching mcp: http://{names[0]}{PATH}", file=sys.stderr)
        if token is None:
            print(f"branching mcp: token {shown}", file=sys.stderr)
        sys.stderr.flush()

        async def serve() -> None:
            await serving.serve(sockets=[listening])

        try:
            anyio.run(serve)
        finally:
            if scope is not None:
                scope.forget(end)


class _OneToken:
    """Knows one token, which may do everything."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def verify_token(self, token: str) -> AccessToken | None:
        """Returns what a request with this token may do, None for nothing."""
        if not hmac.compare_digest(token.encode(), self._token):
            return None
        return AccessToken(token=token, client_id="owner", scopes=[])
