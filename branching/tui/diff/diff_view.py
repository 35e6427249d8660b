"""A comparison in two columns. Only the lines in sight are drawn, however many there are."""

from __future__ import annotations

from rich.text import Text
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from branching.tui.diff.line_diff import Comparison, Row
from branching.tui.diff.syntax import Colours
from branching.tui.formatting import filled, plain

_SIGNS = {"same": " ", "changed": "~", "removed": "-", "added": "+"}
_STYLES = {"changed": "yellow", "removed": "red", "added": "green", "hunk": "cyan"}
_NUMBER_WIDTH = 4
WIDTH_MIN = 20


class DiffView(ScrollView):
    """Shows one comparison at a time; a note of several lines where there are no rows."""

    DEFAULT_CSS = "DiffView { overflow-y: scroll; overflow-x: hidden; }"

    def __init__(self, name: str) -> None:
        super().__init__(id=name)
        self._rows: tuple[Row, ...] = ()
        self._colours: Colours = ()
        self._note: list[Text] = []
        self._text = ""

    def show(self, comparison: Comparison, colours: Colours = ()) -> None:
        """Shows another one, from its beginning, its lines with these colours."""
        self._colours = colours
        self._rows, self._text = comparison.rows, comparison.note
        self._lay_out()
        self.scroll_home(animate=False)
        self.refresh()

    def on_resize(self) -> None:
        self._lay_out()

    def render_line(self, y: int) -> Strip:
        """Draws one line of those in sight."""
        number = y + self.scroll_offset.y
        width = self._width
        text = Text()
        if number < len(self._rows):
            colours = self._colours[number] if number < len(self._colours) else (None, None)
            text = row_text(self._rows[number], width, *colours)
        elif number < len(self._note):
            text = self._note[number]
        strip = Strip(text.render(self.app.console)).adjust_cell_length(self.size.width)
        return strip.apply_style(self.rich_style)

    @property
    def _width(self) -> int:
        return max(WIDTH_MIN, self.scrollable_content_region.width)

    def _lay_out(self) -> None:
        note = Text("\n".join(map(plain, self._text.split("\n"))))
        self._note = list(note.wrap(self.app.console, self._width)) if self._text else []
        self.virtual_size = Size(self._width, len(self._rows) or len(self._note))


def row_text(row: Row, width: int, left: Text | None = None, right: Text | None = None) -> Text:
    """Draws one row. Long lines are cut: the whole file is in the branch.

    `left` and `right` are its lines with colours; then the numbers and the sign have the colour of
    the change, else all of a changed line has it.
    """
    style = _STYLES.get(row.kind, "")
    if row.kind == "hunk":
        return Text((row.left or "").ljust(width, "─")[:width], style)
    half = (width - 3) // 2
    text = Text(end="")
    text.append_text(_cell(row.left, row.left_number, half, style, left))
    text.append(f" {_SIGNS[row.kind]} ", style)
    text.append_text(_cell(row.right, row.right_number, half, style, right))
    return text


def _cell(
    line: str | None, number: int | None, width: int, style: str, coloured: Text | None
) -> Text:
    if line is None:
        return Text(" " * width)
    cell = Text(end="").append(f"{number:>{_NUMBER_WIDTH}} ", style)
    content = filled(plain(line), width - _NUMBER_WIDTH - 1)
    if coloured is None or not coloured.spans:
        return cell.append(content, style)
    shown = Text(content, end="")
    for span in coloured.spans:  # the content is the line, cut or filled up
        shown.stylize(span.style, span.start, span.end)
    return cell.append_text(shown)
