"""The bounded buffer for what a process prints."""

from __future__ import annotations


class OutputTail:
    """Keeps the last bytes of an output. The end is where tools print their summary."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._kept = bytearray()

    def feed(self, arrived: bytes) -> None:
        """Appends bytes, and forgets the oldest."""
        self._kept += arrived
        if len(self._kept) > 2 * self._bytes_max:  # rarely, because it copies the rest
            del self._kept[: -self._bytes_max]

    @property
    def text(self) -> str:
        """The bytes that are kept, as text. What is not UTF-8 is replaced."""
        return self._kept[-self._bytes_max :].decode("utf-8", "replace")
