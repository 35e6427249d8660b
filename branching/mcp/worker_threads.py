"""Awaits blocking functions: short ones in the shared thread pool, long ones in their own thread.

It is what `branching._threads` is to asyncio, for anyio, on which the MCP package runs: anyio
raises a cancellation again at every await until it is shielded, so a loop that catches it and
waits on, as that one has, would never rest.

When a request is cancelled, or its client has disconnected, the cancellation is raised after the
function has returned. The scope of a long one is cancelled, which ends the processes it started.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread

from branching._cancellation import STOP_GRACE_SECONDS, CancelScope

R = TypeVar("R")


async def run_short(function: Callable[[], R]) -> R:
    """Runs a short blocking function in the shared thread pool."""
    return await anyio.to_thread.run_sync(function)


async def run_long(function: Callable[[], R], *, name: str, scope: CancelScope | None = None) -> R:
    """Runs a blocking function that may take minutes in its own thread.

    So waiting commands do not occupy the shared thread pool.

    Args:
        function: The function.
        name: The name of the thread.
        scope: Cancelled when the request is cancelled. Default: a new one.
    """
    scope = scope or CancelScope()
    ended = anyio.Event()
    values: list[R] = []
    errors: list[BaseException] = []
    context = contextvars.copy_context()

    def call() -> None:
        try:
            values.append(context.run(scope.run, function))
        except BaseException as error:  # raised again by the task
            errors.append(error)

    start_thread(call, name=name, on_end=ended.set)
    try:
        await ended.wait()
    except BaseException:
        scope.cancel(STOP_GRACE_SECONDS)
        with anyio.CancelScope(shield=True):
            await ended.wait()
        raise
    if errors:
        raise errors[0]
    return values[0]


def start_thread(
    work: Callable[[], object], *, name: str, on_end: Callable[[], object], is_daemon: bool = True
) -> None:
    """Calls `work` in a new thread, and then `on_end` in the event loop's, whatever it raises."""
    token = anyio.lowlevel.current_token()

    def call() -> None:
        try:
            work()
        finally:
            anyio.from_thread.run_sync(on_end, token=token)

    threading.Thread(target=call, name=name, daemon=is_daemon).start()
