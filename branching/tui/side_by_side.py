"""The screen that shows two branches, or a branch and its parent, side by side, file by file."""

from __future__ import annotations

from typing import ClassVar, Protocol

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, OptionList, Static
from textual.widgets.option_list import Option

from branching.tui.comparison import Comparison
from branching.tui.errands import Errands
from branching.tui.looks import plain


class Sides(Protocol):
    """What can be shown side by side."""

    @property
    def left_name(self) -> str: ...
    @property
    def right_name(self) -> str: ...
    @property
    def paths(self) -> tuple[str, ...]:
        """What can be chosen."""

    def title(self, path: str) -> str:
        """Returns the line that stands for one of them."""

    def compared(self, path: str) -> Comparison:
        """Compares one of them. It may block, and raise OSError."""


_SIGNS = {"same": " ", "changed": "~", "removed": "-", "added": "+"}
_STYLES = {"changed": "yellow", "removed": "red", "added": "green", "hunk": "cyan"}
_NUMBER_WIDTH = 4


class SideBySide(ModalScreen[None]):
    """Above the files that differ, below the chosen one in two columns, cut into hunks."""

    DEFAULT_CSS = """
    SideBySide { background: $background; }
    SideBySide #heading { height: 1; text-style: reverse; text-wrap: nowrap; }
    SideBySide #files { height: auto; max-height: 5; padding: 0; }
    SideBySide #files, SideBySide #files:focus { border: none; }
    SideBySide #files > .option-list--option-highlighted { text-style: reverse; }
    SideBySide #scroll { height: 1fr; border-top: solid $foreground; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,d", "dismiss", "back"),
        Binding("n", "hunk(1)", "next hunk"),
        Binding("p,N", "hunk(-1)", "previous hunk"),
        Binding("right,l", "file(1)", "next file"),
        Binding("left,h", "file(-1)", "previous file"),
    ]

    def __init__(self, pair: Sides, errands: Errands, path: str | None = None) -> None:
        super().__init__()
        self._pair = pair
        self._errands = errands
        self._first = pair.paths.index(path) if path in pair.paths else 0
        self._comparison: Comparison | None = None
        self._hunk = -1

    def compose(self) -> ComposeResult:
        yield Static(id="heading")
        yield OptionList(
            *(Option(Text(plain(self._pair.title(path)))) for path in self._pair.paths), id="files"
        )
        with VerticalScroll(id="scroll"):
            yield Static(id="sides")
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        files = self.query_one("#files", OptionList)
        files.focus()
        if self._pair.paths:
            files.highlighted = self._first
        else:
            self.query_one("#sides", Static).update(Text("no file differs"))
        self._show_heading()

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        self._read(self._pair.paths[event.option_index])

    def on_resize(self) -> None:
        self._draw()
        self._show_heading()

    def action_file(self, step: int) -> None:
        files = self.query_one("#files", OptionList)
        if self._pair.paths and files.highlighted is not None:
            files.highlighted = (files.highlighted + step) % len(self._pair.paths)

    def action_hunk(self, step: int) -> None:
        if self._comparison is None or not (hunks := self._comparison.hunks):
            return
        self._hunk = min(max(self._hunk + step, 0), len(hunks) - 1)
        self.query_one("#scroll").scroll_to(y=hunks[self._hunk], animate=False)
        self._show_heading()

    @work(exclusive=True)
    async def _read(self, path: str) -> None:
        try:
            self._comparison = await self._errands.do(self._pair.compared, path)
        except (OSError, RuntimeError) as error:
            self._comparison = Comparison(path=path, note=f"[{path} cannot be read: {error}]")
        self._hunk = 0 if self._comparison.hunks else -1
        self._draw()
        self._show_heading()
        self.query_one("#scroll").scroll_home(animate=False)

    def _show_heading(self) -> None:
        found = self._comparison
        names = f"{self._pair.left_name} │ {self._pair.right_name}"
        facts = [names, f"{len(self._pair.paths)} file(s)"]
        if found is not None and found.hunks:
            facts.append(f"hunk {self._hunk + 1}/{len(found.hunks)}")
        self.query_one("#heading", Static).update(Text(" · ".join(facts), no_wrap=True))

    def _draw(self) -> None:
        if self._comparison is not None:
            width = max(20, self.size.width - 2)  # the scroll bar has two columns
            self.query_one("#sides", Static).update(side_by_side(self._comparison, width))


def side_by_side(comparison: Comparison, width: int) -> Text:
    """Draws a comparison in two columns. Long lines are cut: the whole file is in the branch."""
    if comparison.note:
        return Text(_plain_lines(comparison.note))
    half = (width - 3) // 2
    text = Text(no_wrap=True)
    for row in comparison.rows:
        style = _STYLES.get(row.kind, "")
        if row.kind == "hunk":
            text.append((row.left or "").ljust(width, "─")[:width] + "\n", style)
            continue
        sign = _SIGNS[row.kind]
        text.append(_cell(row.left, row.left_number, half), style)
        text.append(f" {sign} ")
        text.append(_cell(row.right, row.right_number, half) + "\n", style)
    return text


def _plain_lines(text: str) -> str:
    """Makes a text of several lines harmless."""
    return "\n".join(map(plain, text.split("\n")))


def _cell(line: str | None, number: int | None, width: int) -> str:
    if line is None:
        return " " * width
    room = width - _NUMBER_WIDTH - 1
    return f"{number:>{_NUMBER_WIDTH}} {_cut(plain(line), room):<{room}}"


def _cut(line: str, width: int) -> str:
    """Cuts a line at its end, and shows it."""
    return line if len(line) <= width else line[: width - 1] + "…"
