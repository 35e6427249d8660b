"""Work that blocks, awaited: short steps by the shared threads, long ones by a thread of their own.

A step is never left half-way: when the request is cancelled meanwhile (its client has lost
interest, or is gone), the cancellation goes on only after the step has ended. A long one is told
to end: its scope is cancelled, which reaches the processes it started.
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
    """Runs something short to its end."""
    return await anyio.to_thread.run_sync(function)


async def run_long(function: Callable[[], R], *, name: str, scope: CancelScope | None = None) -> R:
    """Runs something that may take minutes, under `scope`, in a thread of its own: commands that
    wait must not keep others from being served."""
    scope = scope or CancelScope()
    ended = anyio.Event()
    values: list[R] = []
    errors: list[BaseException] = []
    token = anyio.lowlevel.current_token()
    context = contextvars.copy_context()

    def call() -> None:
        try:
            values.append(context.run(scope.run, function))
        except BaseException as error:  # raised again by the task
            errors.append(error)
        anyio.from_thread.run_sync(ended.set, token=token)

    threading.Thread(target=call, name=name, daemon=True).start()
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
