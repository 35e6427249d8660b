"""Ends the call of an HTTP client whose connection is gone.

The protocol's library cancels such a call only for protocol versions from 2026 on. Before, a client
could resume a stream, for which the server needs an event store; this server has none, so nothing
could ever receive the answer. `watched` notices that a request's connection was closed, and
`cancelled_when_gone` cancels the call that the request made.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError

_GONE = "branching.gone"
"""The key in a request's ASGI scope, of the event that is set when its connection is closed."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]


def watched(app: App) -> App:
    """Returns an ASGI application that does the same, and notices closed connections."""

    async def call(scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        gone = scope[_GONE] = anyio.Event()

        async def watching() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                gone.set()
            return message

        await app(scope, watching, send)

    return call


@asynccontextmanager
async def cancelled_when_gone(context: Context[Any, Any]) -> AsyncIterator[None]:
    """Cancels the `with` block when the connection of the call's request is closed.

    Raises:
        ToolError: The block was cancelled. The client does not receive it.
    """
    request = context.request_context.request
    gone = None if request is None else request.scope.get(_GONE)
    if gone is None:  # over pipes the server ends with its client
        yield
        return

    async def cancel() -> None:
        await gone.wait()
        block.cancel()

    failure: Exception | None = None
    with anyio.CancelScope() as block:
        async with anyio.create_task_group() as group:
            group.start_soon(cancel)
            try:
                yield
            except Exception as error:  # raised again below: the group would wrap it
                failure = error
            group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    if block.cancelled_caught:
        raise ToolError("the connection of the client was closed; the call was cancelled")
