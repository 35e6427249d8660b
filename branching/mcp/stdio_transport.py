"""The server over standard input and output. It ends when the client ends.

The end of standard input ends the server. To end it in the same way after a signal, a thread copies
standard input to a pipe that the protocol's library reads; a signal closes that pipe.
"""

from __future__ import annotations

import os
import select
import threading

import anyio

from branching._cancellation import CancelScope
from branching.mcp.server import make_server
from branching.mcp.workspace_session import WorkspaceSession

_COPY_BYTES = 1 << 16


def serve_stdio(session: WorkspaceSession) -> None:
    """Serves until the client closes our standard input, or the calling scope is cancelled."""
    outside = os.dup(0)
    inside, into = os.pipe()
    stopping, stop = os.pipe()
    os.dup2(inside, 0)
    os.close(inside)
    copying = threading.Thread(target=_copy, args=(outside, into, stopping), daemon=True)
    copying.start()
    scope = CancelScope.current()

    def end(_grace_seconds: float) -> None:
        os.write(stop, b"\0")

    if scope is not None:
        scope.on_cancel(end)
    try:
        anyio.run(make_server(session).run_stdio_async)
    except BaseException as error:
        if not _is_client_gone(error):
            raise
    finally:
        if scope is not None:
            scope.forget(end)
        end(0.0)
        copying.join()
        os.dup2(outside, 0)
        for descriptor in (outside, stopping, stop):
            os.close(descriptor)


def _copy(outside: int, into: int, stopping: int) -> None:
    try:
        while True:
            ready = select.select([outside, stopping], [], [])[0]
            if stopping in ready:
                return
            data = os.read(outside, _COPY_BYTES)
            if not data:
                return
            while data:
                data = data[os.write(into, data) :]
    except OSError:
        pass  # the reader or the client has gone: the end in both cases
    finally:
        os.close(into)


def _is_client_gone(error: BaseException) -> bool:
    """Returns whether an error only says that the client has closed the pipe."""
    parts = getattr(error, "exceptions", None)
    if parts is not None:
        return all(map(_is_client_gone, parts))
    return isinstance(error, (BrokenPipeError, ConnectionResetError))
