"""Dialogs: a question that is answered by a key, and an input line.

A dialog that opens automatically may open while a person is typing. It accepts no answer until no
key was pressed for QUIET_SECONDS. The keys until then go to the input line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import Input, OptionList, Static

from branching.tui.formatting import plain

LINES_MAX = 200
"""Maximum number of lines in a question; the number of further lines is shown."""
QUIET_SECONDS = 1.0
"""Time without a key before a dialog that opened automatically accepts an answer."""

SCROLLED_LINES_MAX = 16
"""Maximum height of the part of a dialog that scrolls."""

WAITING = "What you type goes to the prompt. Pause to answer."

R = TypeVar("R")
Typed = Callable[[events.Key | events.Paste], None]
"""Receives a key or a paste that was meant for the line behind a window."""


class AnswerScreen(ModalScreen[R]):
    """A window whose keys are answers.

    Args:
        typed: For a window that opens by itself: receives what is typed before the window takes
            answers. None for a window that a key has opened; it takes answers immediately.

    Escape always closes the window. `answers` shows its keys as soon as they count.
    """

    AUTO_FOCUS = ""  # the focus comes when answers count
    KEYS = ""
    """The keys that answer, and what each means."""

    def __init__(self, typed: Typed | None = None) -> None:
        super().__init__()
        self.answers = Static(WAITING)
        self._typed = typed
        self._quiet: Timer | None = None

    def on_mount(self) -> None:
        if self._typed is None:
            self._take_answers()
        else:
            self._wait()

    def answer_widget(self) -> Widget | None:
        """Returns the widget that gets the focus when answers count."""
        return None

    def on_resize(self) -> None:
        self.call_after_refresh(self._fit)

    def _fit(self) -> None:
        """Gives the part that scrolls the lines that the others leave: the keys stay in sight."""
        if self.is_attached:
            fit_scrolled(self, self.answers)

    async def on_event(self, event: events.Event) -> None:
        is_escape = isinstance(event, events.Key) and event.key == "escape"
        if self._typed is None or self._quiet is None or is_escape:
            await super().on_event(event)
        elif isinstance(event, events.Key | events.Paste):
            self._quiet.stop()
            self._wait()
            self._typed(event)
        else:
            await super().on_event(event)

    def _wait(self) -> None:
        self._quiet = self.set_timer(QUIET_SECONDS, self._take_answers)

    def _take_answers(self) -> None:
        self._quiet = None
        self.answers.update(Text(self.KEYS))
        self.set_focus(self.answer_widget())
        self.call_after_refresh(self._fit)


def fit_scrolled(screen: ModalScreen[R], below: Widget) -> None:
    """Limits the height of the part of a dialog that scrolls, so that the dialog fits.

    Args:
        screen: The screen of the dialog.
        below: A widget beside that part.
    """
    box = below.parent
    if not isinstance(box, Widget):
        return
    scrolled = next(each for each in box.children if isinstance(each, (VerticalScroll, OptionList)))
    others = sum(each.outer_size.height for each in box.children if each is not scrolled)
    room = screen.size.height - box.gutter.height - others
    scrolled.styles.max_height = max(1, min(SCROLLED_LINES_MAX, room))


class Question(AnswerScreen[str]):
    """Asks; returns the key that was struck, "" for Escape. Nothing is chosen by mistake: the
    answer to a question that changes something is never Enter alone, unless it is asked for.
    """

    DEFAULT_CSS = """
    Question { align: center middle; }
    Question > Vertical {
        width: 90%; max-width: 100; height: auto; max-height: 100%; border: solid $foreground;
        padding: 0 1; background: $background;
    }
    Question VerticalScroll { height: auto; }
    Question .title { text-style: bold; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "answer('')", "back")]

    def __init__(
        self,
        title: str,
        lines: Sequence[str],
        answers: Sequence[tuple[str, str]],
        typed: Typed | None = None,
    ) -> None:
        """`answers` are keys and what they stand for; the key "enter" may be one of them."""
        super().__init__(typed)
        self._title = title
        self._lines = lines
        self._keys = [key for key, _ in answers]
        pairs = [*answers, ("escape", "back")]
        self.KEYS = "   ".join(f"[{key}] {what}" for key, what in pairs)

    def compose(self) -> ComposeResult:
        more = len(self._lines) - LINES_MAX
        lines = [*self._lines[:LINES_MAX], *([f"and {more} more"] if more > 0 else [])]
        with Vertical():
            yield Static(Text(self._title), classes="title")
            with VerticalScroll():
                yield Static(Text("\n".join(map(plain, lines))), id="lines")
            yield self.answers

    def answer_widget(self) -> Widget:
        return self.query_one(VerticalScroll)

    def on_key(self, event: events.Key) -> None:
        for key in self._keys:
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
