"""Awaits blocking functions: short ones in the shared thread pool, long ones in their own thread.

The MCP package runs on anyio, which raises a cancellation again at every await until it is
shielded. A loop that catches it and waits on, as `branching._threads.run_in_thread` has, would
never rest; the hand-over from a thread is of that module.

When a request is cancelled, or its client has disconnected, the cancellation is raised after the
function has returned. The scope of a long one is cancelled, which ends the processes it started.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

from branching._cancellation import STOP_GRACE_SECONDS, CancelScope
from branching._threads import call_soon, thread_future

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
    future: asyncio.Future[R]
    future, settle = thread_future()
    context = contextvars.copy_context()
    threading.Thread(
        target=settle, args=(lambda: context.run(scope.run, function),), name=name, daemon=True
    ).start()
    try:
        await asyncio.wait([future])
    except BaseException:
        scope.cancel(STOP_GRACE_SECONDS)
        with anyio.CancelScope(shield=True):
            await asyncio.wait([future])
        future.exception()  # seen: the cancellation is raised
        raise
    return future.result()


def start_thread(
    work: Callable[[], object], *, name: str, on_end: Callable[[], object], is_daemon: bool = True
) -> None:
    """Calls `work` in a new thread, and then `on_end` in the event loop's, whatever it raises."""
    loop = asyncio.get_running_loop()

    def call() -> None:
        try:
            work()
        finally:
            call_soon(loop, on_end)

    threading.Thread(target=call, name=name, daemon=is_daemon).start()
