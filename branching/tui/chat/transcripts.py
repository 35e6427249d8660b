"""What was said, tab by tab: whole entries, and the piece that has no line end yet."""

from __future__ import annotations

from branching.tui.chat.protocols import Line

OVERVIEW = ""
"""The tab of the parent."""
LINES_MAX = 2000
"""Of one transcript the newest are kept."""


class Transcripts:
    """Those of one chat."""

    def __init__(self) -> None:
        self._lines: dict[str, list[Line]] = {}
        self._counts: dict[str, int] = {}
        self._partial: dict[str, str] = {}

    def lines(self, tab: str) -> list[Line]:
        """Returns the entries that are kept, the oldest first."""
        return self._lines.get(tab, [])

    def count(self, tab: str) -> int:
        """Tells how many entries there have ever been."""
        return self._counts.get(tab, 0)

    def partial(self, tab: str) -> str:
        """Returns what is being said: the end that has no line end yet."""
        return self._partial.get(tab, "")

    def add(self, tab: str, line: Line) -> None:
        """Adds an entry, after what was being said."""
        self.flush(tab)
        self._append(tab, line)

    def heard(self, tab: str, text: str) -> None:
        """Takes a piece of what an agent says; whole lines are entries."""
        *whole, rest = (self._partial.get(tab, "") + text).split("\n")
        for line in whole:
            self._append(tab, Line("agent", line))
        self._partial[tab] = rest

    def flush(self, tab: str) -> None:
        """Takes what was being said as said."""
        rest = self._partial.pop(tab, "")
        if rest.strip():
            self._append(tab, Line("agent", rest))

    def _append(self, tab: str, line: Line) -> None:
        lines = self._lines.setdefault(tab, [])
        lines.append(line)
        del lines[:-LINES_MAX]
        self._counts[tab] = self._counts.get(tab, 0) + 1
