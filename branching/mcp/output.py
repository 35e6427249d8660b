"""What a command printed, bounded: its beginning and its end, for a model has little room."""

from __future__ import annotations

from collections import deque

HEAD_CHARACTERS_MAX = 8_000
TAIL_CHARACTERS_MAX = 24_000
"""The end is where compilers and test runners sum up."""


class Output:
    """Takes lines, of which it keeps the first and the last ones."""

    def __init__(
        self, head_max: int = HEAD_CHARACTERS_MAX, tail_max: int = TAIL_CHARACTERS_MAX
    ) -> None:
        self._head: list[str] = []
        self._head_room = head_max
        self._tail: deque[str] = deque()
        self._tail_room = tail_max
        self.lines_left_out = 0

    def add(self, line: str) -> None:
        """Takes the next line."""
        cost = len(line) + 1
        if self._head_room >= cost:
            self._head.append(line)
            self._head_room -= cost
            return
        self._head_room = 0
        self._tail.append(line)
        self._tail_room -= cost
        while self._tail_room < 0:
            self._tail_room += len(self._tail.popleft()) + 1
            self.lines_left_out += 1

    @property
    def text(self) -> str:
        """The lines; where some are left out a line says how many."""
        gap = [f"[{self.lines_left_out} lines left out]"] if self.lines_left_out else []
        return "\n".join([*self._head, *gap, *self._tail])
