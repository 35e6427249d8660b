"""Bounded capture of a command's output: its beginning and its end."""

from __future__ import annotations

import threading
from collections import deque

from branching._sanitize import plain

HEAD_BYTES_MAX = 6_000
TAIL_BYTES_MAX = 18_000
"""The end is where compilers and test runners sum up. Both count UTF-8: a character that is not
ASCII costs a model about as many tokens as it has bytes, a word of ASCII fewer."""


class BoundedOutput:
    """Keeps the first and the last bytes of a command's lines. Safe from any thread.

    A line that does not fit is cut inside, between characters: a single line of any length leaves
    its beginning and its end. Control sequences, such as colours, are left out.
    """

    def __init__(self, head_max: int = HEAD_BYTES_MAX, tail_max: int = TAIL_BYTES_MAX) -> None:
        self._head: list[str] = []
        self._head_room = head_max
        self._tail: deque[bytes] = deque()
        self._tail_room = tail_max
        self._is_empty = True
        self._lock = threading.Lock()
        self.characters_left_out = 0

    def add(self, lines: str) -> None:
        """Appends a line or several, without the end of the last one."""
        with self._lock:
            self._add(plain(lines))

    def _add(self, lines: str) -> None:
        text = lines if self._is_empty else f"\n{lines}"
        self._is_empty = False
        data = text.encode("utf-8", "surrogatepass")
        if self._head_room:
            end = _start_of_character(data, self._head_room)
            self._head.append(_decoded(data[:end]))
            self._head_room = self._head_room - end if end == len(data) else 0
            data = data[end:]
        if not data:
            return
        self._tail.append(data)
        self._tail_room -= len(data)
        while self._tail_room < 0:
            oldest = self._tail.popleft()
            cut = _next_character(oldest, min(len(oldest), -self._tail_room))
            self._tail_room += cut
            self.characters_left_out += len(_decoded(oldest[:cut]))
            if cut < len(oldest):
                self._tail.appendleft(oldest[cut:])

    @property
    def text(self) -> str:
        """The output; a line in the middle says how many characters are left out."""
        with self._lock:
            gap = ""
            if self.characters_left_out:
                gap = f"\n[{self.characters_left_out} characters left out]\n"
            return "".join([*self._head, gap, *map(_decoded, self._tail)])


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _start_of_character(data: bytes, at: int) -> int:
    """Returns the start of the character that has the byte at `at`; at most the length."""
    at = min(at, len(data))
    while 0 < at < len(data) and data[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _next_character(data: bytes, at: int) -> int:
    """Returns `at`, or the start of the next character if it is inside of one."""
    while at < len(data) and data[at] & 0xC0 == 0x80:
        at += 1
    return at
