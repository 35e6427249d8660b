"""A row of chips, one a branch: number, mark, name. The chosen one is always in sight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text
from textual.widgets import Static

from branching.tui.formatting import mark, style


@dataclass(frozen=True)
class Tab:
    """One branch in the row."""

    name: str
    state: str


def chips_text(tabs: Sequence[Tab], chosen: int, width: int) -> Text:
    """Draws as many chips as there is room for, the chosen one among them."""
    drawn = [f" {index + 1} {mark(tab.state)} {tab.name} " for index, tab in enumerate(tabs)]
    first = 0
    while first < chosen and sum(map(cell_len, drawn[first : chosen + 1])) > width - 2:
        first += 1
    text = Text(no_wrap=True, overflow="ellipsis")
    if first:
        text.append("<", "dim")
    for index in range(first, len(drawn)):
        look = style(tabs[index].state)
        text.append(drawn[index], f"{look} reverse".strip() if index == chosen else look)
    return text


class TabBar(Static):
    """The row as a widget."""

    DEFAULT_CSS = "TabBar { height: 1; width: 1fr; }"

    def show(self, tabs: Sequence[Tab], chosen: int) -> None:
        """Draws the chips anew."""
        self.update(chips_text(tabs, chosen, self.size.width or 80))
