"""Work that may block (files, sockets, the daemon), done in threads for an event loop.

Each kind of errand has a thread of its own, so that a commit that takes a minute does not keep the
picture from moving. The threads are daemons and nobody waits for them at the end: one that hangs in
a dead mount must not keep a person from quitting. What was sent to the daemon is carried out whole
or not at all, whether somebody is left to hear of it or not.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

WAITING_MAX = 64
"""Errands of one kind that wait for their turn; more are refused."""

R = TypeVar("R")


class BackgroundCalls:
    """One kind. It belongs to the event loop that `do` is called in."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.Queue[Callable[[], None]] = queue.Queue(WAITING_MAX)
        self._thread: threading.Thread | None = None

    async def do(self, function: Callable[..., R], *args: Any, **options: Any) -> R:
        """Calls the function in the thread, after all that was asked before; raises what it raises.

        RuntimeError when too many wait already. Cancelled, it is carried out all the same.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()

        def settle(error: BaseException | None, value: Any = None) -> None:
            if future.done():
                return  # nobody waits any more
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)

        def run() -> None:
            try:
                value = function(*args, **options)
            except BaseException as error:  # raised again where it is awaited
                told: tuple[BaseException | None, Any] = (error, None)
            else:
                told = (None, value)
            try:
                loop.call_soon_threadsafe(settle, *told)
            except RuntimeError:
                pass  # the loop is closed: the person has left

        try:
            self._queue.put_nowait(run)
        except queue.Full:
            raise RuntimeError(f"{self._queue.qsize()} errands wait already; try later") from None
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        return await future

    def _work(self) -> None:
        while True:
            self._queue.get()()
