"""Small windows in front of the others: a question with keys as answers, and a line to type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from branching.tui.looks import plain

LINES_MAX = 200
"""Of what a question is about; of the rest is told how much it is."""


class Question(ModalScreen[str]):
    """Asks; returns the key that was struck, "" for Escape. Nothing is chosen by mistake: the
    answer to a question that changes something is never Enter alone, unless it is asked for.
    """

    DEFAULT_CSS = """
    Question { align: center middle; }
    Question > Vertical {
        width: 90%; max-width: 100; height: auto; max-height: 90%; border: solid $foreground;
        padding: 0 1; background: $background;
    }
    Question VerticalScroll { height: auto; max-height: 12; }
    Question .title { text-style: bold; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "answer('')", "back")]

    def __init__(
        self, title: str, lines: Sequence[str], answers: Sequence[tuple[str, str]]
    ) -> None:
        """`answers` are keys and what they stand for; the key "enter" may be one of them."""
        super().__init__()
        self._title = title
        self._lines = lines
        self._answers = [*answers, ("escape", "back")]

    def compose(self) -> ComposeResult:
        more = len(self._lines) - LINES_MAX
        lines = [*self._lines[:LINES_MAX], *([f"and {more} more"] if more > 0 else [])]
        with Vertical():
            yield Static(Text(self._title), classes="title")
            with VerticalScroll():
                yield Static(Text("\n".join(map(plain, lines))), id="lines")
            keys = "   ".join(f"[{key}] {what}" for key, what in self._answers)
            yield Static(Text(keys), id="answers")

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()

    def on_key(self, event: events.Key) -> None:
        for key, _ in self._answers[:-1]:
            if key in (event.key, event.character):
                event.stop()
                self.dismiss(key)
                return

    def action_answer(self, key: str) -> None:
        self.dismiss(key)


class Line(ModalScreen[str]):
    """Asks for one line of text; "" for Escape or nothing."""

    DEFAULT_CSS = """
    Line { align: center bottom; }
    Line > Vertical {
        width: 100%; height: auto; border: solid $foreground; background: $background;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss('')", "back")]

    def __init__(self, title: str, text: str = "") -> None:
        super().__init__()
        self._title = title
        self._text = text

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(Text(self._title))
            yield Input(self._text, compact=True)

    def on_mount(self) -> None:
        self.query_one(Input).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip())
