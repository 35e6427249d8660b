"""The transcript of a chat's tab: entries that wrap anew when the terminal changes its width."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.markdown import Markdown
from rich.text import Text
from textual.containers import VerticalScroll
from textual.widgets import Static

from branching.tui.chat.protocols import Line
from branching.tui.formatting import coloured, plain

ENTRIES_MAX = 500
"""So many entries are shown and kept to scroll back."""
SHELL_LINES_MAX = 500
"""So many lines of one shell command's output are shown."""
_LEADS = {"you": "> ", "note": "· ", "error": "! ", "tool": "  ⚙ "}
_STYLES = {"you": "bold", "note": "dim", "error": "red", "tool": "cyan"}


class TranscriptView(VerticalScroll):
    """Shows entries, the newest at the bottom. It follows the end unless a person scrolls up.

    Consecutive lines of an agent are one Markdown text.
    """

    DEFAULT_CSS = "TranscriptView Static { height: auto; }"

    def __init__(self, name: str) -> None:
        super().__init__(id=name, can_focus=False)
        self._agent_lines: list[str] = []
        """Of the last entry, if an agent said it."""

    def on_mount(self) -> None:
        self.anchor()

    def clear(self) -> None:
        """Removes all entries."""
        self._agent_lines = []
        self.remove_children()

    def add(self, lines: Sequence[Line]) -> None:
        """Adds entries at the end."""
        shown: list[tuple[RenderableType, bool]] = []
        last = self.children[-1] if self.children and self._agent_lines else None
        for line in lines[-ENTRIES_MAX:]:
            if line.who != "agent":
                self._agent_lines = []
                shown.append((entry_text(line), False))
                continue
            goes_on = bool(self._agent_lines)
            self._agent_lines.append(line.text)
            text = agent_markdown(self._agent_lines)
            if goes_on and shown:
                shown[-1] = (text, True)
            elif goes_on and isinstance(last, Static):
                last.update(text)
            else:
                shown.append((text, True))
        self.mount_all([Static(content, markup=False) for content, _ in shown])
        if (more := len(self.children) - ENTRIES_MAX) > 0:
            self.remove_children(self.children[:more])


def agent_markdown(lines: Sequence[str]) -> Markdown:
    """Returns what an agent said as Markdown. Line ends stay, and links are shown, not followed."""
    shown: list[str] = []
    is_code = False
    for line in map(plain, lines):
        is_fence = line.lstrip().startswith(("```", "~~~"))
        ends_hard = line and not is_code and not is_fence and not line.lstrip().startswith("|")
        shown.append(f"{line}  " if ends_hard else line)
        is_code ^= is_fence
    return Markdown("\n".join(shown), code_theme="ansi_dark", hyperlinks=False)


def entry_text(line: Line) -> Text:
    """Returns an entry that no agent said. Output of a shell keeps its colours."""
    if line.who == "shell":
        parts = line.text.split("\n")
        if (more := len(parts) - SHELL_LINES_MAX) > 0:
            half = SHELL_LINES_MAX // 2
            parts[half:-half] = [f"[{more} lines left out]"]
        return Text("\n").join(Text.from_ansi(coloured(part)) for part in parts)
    text = "\n".join(plain(part) for part in line.text.split("\n"))
    return Text(_LEADS[line.who] + text, _STYLES[line.who])
