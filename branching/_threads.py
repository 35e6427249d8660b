"""Work that blocks, awaited: by a thread of its own, and never left half-way by a cancellation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

R = TypeVar("R")


async def run_in_thread(
    step: Callable[[], R], *, on_cancel: Callable[[bool], None] | None = None
) -> R:
    """Runs `step` in a thread and returns its value.

    A branch that is being made, or committed, cannot be left alone: when the task is cancelled
    meanwhile, the cancellation goes on only after the step has ended, whatever came of it.
    `on_cancel` is called at each cancellation, to make the step end; True says that it is not the
    first.
    """
    import asyncio
    import contextvars
    import threading

    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[R] = loop.create_future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            value = context.run(step)
        except StopIteration as error:  # no future takes it: it ends what iterates
            raised = RuntimeError(f"StopIteration was raised: {error}")
            raised.__cause__ = error
            loop.call_soon_threadsafe(outcome.set_exception, raised)
        except BaseException as error:  # raised again in the task
            loop.call_soon_threadsafe(outcome.set_exception, error)
        else:
            loop.call_soon_threadsafe(outcome.set_result, value)

    threading.Thread(target=run, name="awaited", daemon=True).start()
    cancelled: asyncio.CancelledError | None = None
    while not outcome.done():
        try:
            await asyncio.wait([outcome])
        except asyncio.CancelledError as again:
            if on_cancel is not None:
                on_cancel(cancelled is not None)
            cancelled = again
    if cancelled is not None:
        outcome.exception()  # seen: the cancellation is what the caller asked for
        raise cancelled
    return outcome.result()
