"""Progress notifications of a call to its client.

There may be thousands of events from several threads. The client gets the newest one, at most ten
times a second. Without events it gets a periodic notification, so that it does not time out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
from mcp.server.mcpserver import Context

from branching._sanitize import plain
from branching._threads import call_soon
from branching.patterns import Event

INTERVAL_SECONDS = 0.1
SIGN_OF_LIFE_SECONDS = 10.0
MESSAGE_CHARACTERS_MAX = 200


@asynccontextmanager
async def report_progress(ctx: Context) -> AsyncIterator[Callable[[Event], None]]:
    """Yields the function that takes events, from any thread."""
    progress = _Progress(ctx)
    failure: Exception | None = None
    async with anyio.create_task_group() as group:
        group.start_soon(progress.tell_all)
        try:
            yield progress.take
        except Exception as error:  # raised again below: the group would wrap it
            failure = error
        group.cancel_scope.cancel()
    await progress.tell_newest()
    if failure is not None:
        raise failure


class _Progress:
    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._loop = asyncio.get_running_loop()
        self._arrived = anyio.Event()
        self._is_awake = False
        self._newest = ""
        self._count = 0
        self._started = time.monotonic()

    def take(self, event: Event) -> None:
        """Takes an event; in any thread."""
        self._newest = _words(event)
        if not self._is_awake:  # of a thousand lines one wakes the loop
            self._is_awake = True
            call_soon(self._loop, self._wake)

    def _wake(self) -> None:
        self._arrived.set()

    async def tell_all(self) -> None:
        """Tells until it is cancelled."""
        while True:
            with anyio.move_on_after(SIGN_OF_LIFE_SECONDS):
                await self._arrived.wait()
            if not self._newest:
                self._newest = f"still at it, {time.monotonic() - self._started:.0f} s"
            self._arrived = anyio.Event()
            self._is_awake = False
            await self.tell_newest()
            await anyio.sleep(INTERVAL_SECONDS)

    async def tell_newest(self) -> None:
        """Sends the newest event if it was not sent yet."""
        message, self._newest = self._newest, ""
        if message:
            self._count += 1
            await self._ctx.report_progress(self._count, message=message)


def _words(event: Event) -> str:
    who = f"[{event.index}] " if event.index >= 0 else "[setup] "
    if event.kind == "output":
        text = plain(event.text.rpartition("\n")[2])
    elif event.kind == "finished":
        text = f"{event.state} after {event.seconds:.1f} s"
    elif event.kind == "scored":
        text = f"scored {event.score}"
    else:
        text = event.kind
    return (who + text)[:MESSAGE_CHARACTERS_MAX]
