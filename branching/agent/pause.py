"""Pauses an agent's run before its next model request.

A request that was sent is still answered, and running tools are not interrupted. A run that can be
suspended at any time, such as a program, sets `on_change`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Pause:
    """One run's. Belongs to the event loop of the run."""

    def __init__(self) -> None:
        self._over = asyncio.Event()
        self._over.set()
        self.on_change: Callable[[bool], None] = lambda _: None
        """Called when the pause begins (True) or ends (False)."""

    @property
    def is_on(self) -> bool:
        """The run waits, or will at its next request."""
        return not self._over.is_set()

    def begin(self) -> None:
        self._over.clear()
        self.on_change(True)

    def end(self) -> None:
        self._over.set()
        self.on_change(False)

    async def over(self) -> None:
        """Waits until the run is not paused."""
        await self._over.wait()
