"""The panels of `branching watch`: the tree, what is known of the chosen branch, what it prints,
which files it changed.

Each draws what it is given, and only that.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual.widgets import OptionList, RichLog, Static
from textual.widgets.option_list import Option

from branching.fs import Change
from branching.tui.looks import coloured
from branching.tui.observation import Output, Sight
from branching.tui.sight_text import change_text, facts_text, tree_text

OUTPUT_LINES_MAX = 2000
FILES_MAX = 1000
"""Nobody looks through more; `branching diff` lists them."""


class BranchTree(OptionList):
    """The branches as a tree, two lines each; one is chosen, one may be marked."""

    def on_resize(self) -> None:
        self.call_after_refresh(self.scroll_to_highlight)  # it may be out of sight now

    def show(self, sights: Sequence[Sight], chosen: int, marked: str) -> None:
        """Draws what has changed. Says nothing of a choice that it was told itself."""
        shown = [self.get_option_at_index(index).id for index in range(self.option_count)]
        with self.prevent(OptionList.OptionHighlighted):
            if shown == [sight.name for sight in sights]:
                for index, sight in enumerate(sights):
                    self.replace_option_prompt_at_index(index, tree_text(sight, marked))
            else:
                self.clear_options()
                self.add_options(
                    [Option(tree_text(sight, marked), id=sight.name) for sight in sights]
                )
            if sights and self.highlighted != chosen:
                self.highlighted = chosen


class Facts(Static):
    """What is known of one branch, in three lines."""

    def show(self, sight: Sight | None) -> None:
        """Draws them."""
        self.update(facts_text(sight))


class Printed(RichLog):
    """What the chosen branch prints."""

    def __init__(self, name: str) -> None:
        super().__init__(id=name, wrap=True, max_lines=OUTPUT_LINES_MAX)

    def show(self, output: Output) -> None:
        """Adds a piece."""
        if output.is_first:
            self.clear()
        if not output.is_kept:
            self.write(Text("no output is kept of it", "dim"))
        if output.lines:
            lines = [Text.from_ansi(coloured(line)) for line in output.lines]
            self.write(Text("\n").join(lines))  # one of many lines is drawn faster than many


class FileList(OptionList):
    """The files that the chosen branch changed."""

    def __init__(self, name: str) -> None:
        super().__init__(id=name)
        self._paths: list[str] = []

    def clear(self) -> None:
        """Shows nothing."""
        self._paths = []
        self.clear_options()

    def show(self, changes: Sequence[Change]) -> None:
        """Shows these."""
        self._paths = [change.path for change in changes[:FILES_MAX]]
        lines = [Option(change_text(change)) for change in changes[:FILES_MAX]]
        more = len(changes) - FILES_MAX
        if more > 0:
            lines.append(Option(f"and {more} more: branching diff lists them", disabled=True))
        self.clear_options()
        self.add_options(lines or [Option("none", disabled=True)])

    def path(self, index: int) -> str | None:
        """Returns the path of a line, None if that is of none."""
        return self._paths[index] if index < len(self._paths) else None
