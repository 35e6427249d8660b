"""Bounded capture of a command's output: its beginning and its end."""

from __future__ import annotations

import threading
from collections import deque

HEAD_CHARACTERS_MAX = 6_000
TAIL_CHARACTERS_MAX = 18_000
"""The end is where compilers and test runners sum up."""


class BoundedOutput:
    """Keeps the first and the last characters of a command's lines. Safe from any thread.

    A line that does not fit is cut inside: a single line of any length leaves its beginning and
    its end.
    """

    def __init__(
        self, head_max: int = HEAD_CHARACTERS_MAX, tail_max: int = TAIL_CHARACTERS_MAX
    ) -> None:
        self._head: list[str] = []
        self._head_room = head_max
        self._tail: deque[str] = deque()
        self._tail_room = tail_max
        self._is_empty = True
        self._lock = threading.Lock()
        self.characters_left_out = 0

    def add(self, lines: str) -> None:
        """Appends a line or several, without the end of the last one."""
        with self._lock:
            self._add(lines)

    def _add(self, lines: str) -> None:
        text = lines if self._is_empty else f"\n{lines}"
        self._is_empty = False
        if self._head_room:
            head, text = text[: self._head_room], text[self._head_room :]
            self._head.append(head)
            self._head_room -= len(head)
        if not text:
            return
        self._tail.append(text)
        self._tail_room -= len(text)
        while self._tail_room < 0:
            oldest = self._tail.popleft()
            cut = min(len(oldest), -self._tail_room)
            self._tail_room += cut
            self.characters_left_out += cut
            if cut < len(oldest):
                self._tail.appendleft(oldest[cut:])

    @property
    def text(self) -> str:
        """The output; a line in the middle says how many characters are left out."""
        with self._lock:
            gap = ""
            if self.characters_left_out:
                gap = f"\n[{self.characters_left_out} characters left out]\n"
            return "".join([*self._head, gap, *self._tail])
