"""Steps that block, awaited: run by a thread, and never left half-way by a cancellation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

R = TypeVar("R")


async def finished(step: Callable[[], R]) -> R:
    """Runs `step` in a thread and returns its value.

    A branch that is being made, or committed, cannot be left alone: when the task is cancelled
    meanwhile, the cancellation goes on only after the step has ended, whatever came of it.
    """
    import asyncio

    running = asyncio.ensure_future(asyncio.to_thread(step))
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as asked:
            cancelled = asked
    if cancelled is not None:
        running.exception()  # seen: the cancellation is what the caller asked for
        raise cancelled
    return running.result()
