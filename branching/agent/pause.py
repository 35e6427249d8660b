"""A pause of an agent's run: it waits before its next model request, until it may go on.

The request that is under way is answered first, and what a tool has started ends by itself: neither
is ours to hold up. A run that can be held up in its middle, a program, sets `on_change`.
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
        """Is told at once, whether it is on."""

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
        """Waits until there is no pause."""
        await self._over.wait()
