"""The screen that shows two branches, or a branch and its parent, side by side, file by file."""

from __future__ import annotations

from typing import ClassVar, Protocol

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from branching._threads import QueueThread
from branching.tui.diff.diff_view import DiffView
from branching.tui.diff.line_diff import Comparison
from branching.tui.diff.syntax import Colours, syntax_colours
from branching.tui.formatting import plain
from branching.tui.key_bar import KeyBar


class DiffSource(Protocol):
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


FILES_MAX = 1000
"""In the list; nobody looks through more."""


KEYS = (("esc", "back"), ("n p", "hunks"), ("← →", "files"))
"""Shown in the last line, which has room for them in 40 columns."""


class DiffScreen(ModalScreen[None]):
    """Above the files that differ, below the chosen one in two columns, cut into hunks."""

    DEFAULT_CSS = """
    DiffScreen { background: $background; }
    DiffScreen #heading { height: 1; text-style: reverse; text-wrap: nowrap; }
    DiffScreen #files { height: auto; max-height: 5; padding: 0; }
    DiffScreen #files, DiffScreen #files:focus { border: none; }
    DiffScreen #files > .option-list--option-highlighted { text-style: reverse; }
    DiffScreen #sides { height: 1fr; border-top: solid $foreground; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,d", "dismiss", "back"),
        Binding("n", "hunk(1)", "next hunk"),
        Binding("p,N", "hunk(-1)", "previous hunk"),
        Binding("right,l", "file(1)", "next file"),
        Binding("left,h", "file(-1)", "previous file"),
    ]

    def __init__(self, pair: DiffSource, background: QueueThread, path: str | None = None) -> None:
        super().__init__()
        self._pair = pair
        self._background = background
        self._paths = pair.paths[:FILES_MAX]
        if path in pair.paths and path not in self._paths:
            self._paths = (path, *self._paths)
        self._first = self._paths.index(path) if path in self._paths else 0
        self._columns = DiffView("sides")
        self._keys = KeyBar(id="keys")
        self._comparison: Comparison | None = None
        self._hunk = -1

    def compose(self) -> ComposeResult:
        yield Static(id="heading")
        yield OptionList(
            *(Option(Text(plain(self._pair.title(path)))) for path in self._paths), id="files"
        )
        yield self._columns
        yield self._keys

    def on_mount(self) -> None:
        files = self.query_one("#files", OptionList)
        files.focus()
        if self._paths:
            files.highlighted = self._first
        else:
            self._columns.show(Comparison(path="", note="no file differs"))
        self._show_heading()

    def on_resize(self) -> None:
        self._keys.show(KEYS)

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        event.stop()
        self._read(self._paths[event.option_index])

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()  # it is shown already; the application has lists of its own

    def action_file(self, step: int) -> None:
        files = self.query_one("#files", OptionList)
        if self._paths and files.highlighted is not None:
            files.highlighted = (files.highlighted + step) % len(self._paths)

    def action_hunk(self, step: int) -> None:
        if self._comparison is None or not (hunks := self._comparison.hunks):
            return
        self._hunk = min(max(self._hunk + step, 0), len(hunks) - 1)
        self._columns.scroll_to(y=hunks[self._hunk], animate=False)
        self._show_heading()

    @work(exclusive=True)
    async def _read(self, path: str) -> None:
        try:
            found, colours = await self._background.do(self._compared, path)
        except (OSError, RuntimeError) as error:
            found = Comparison(path=path, note=f"[{path} cannot be read: {error}]")
            colours = ()
        self._comparison = found
        self._hunk = 0 if found.hunks else -1
        self._columns.show(found, colours)
        self._show_heading()

    def _compared(self, path: str) -> tuple[Comparison, Colours]:
        comparison = self._pair.compared(path)
        return comparison, syntax_colours(comparison)

    def _show_heading(self) -> None:
        found = self._comparison
        names = f"{self._pair.left_name} │ {self._pair.right_name}"
        facts = [names, f"{len(self._pair.paths)} file(s)"]
        if len(self._paths) < len(self._pair.paths):
            facts[1] += f", {len(self._paths)} of them here"
        if found is not None and found.hunks:
            facts.append(f"hunk {self._hunk + 1}/{len(found.hunks)}")
        self.query_one("#heading", Static).update(Text(" · ".join(facts), no_wrap=True))
