"""The panels of `branching watch`: the table of branches, what is known of the chosen one, what it
prints, and which files it changed.

Each draws what it is given, and only that.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual.widgets import OptionList, RichLog, Static
from textual.widgets.option_list import Option

from branching._caller import for_caller
from branching.fs import Change
from branching.tui.formatting import coloured
from branching.tui.watch.branch_text import RowLayout, change_text, facts_text, group_text, row_text
from branching.tui.watch.workspace_monitor import BranchView, Output

GROUP_PREFIX = "/"
"""Of the ids of lines that are no branches: no branch has such a name."""
OUTPUT_LINES_MAX = 2000
FILES_MAX = 1000
"""Nobody looks through more; `branching diff` lists them."""


class BranchTable(OptionList):
    """The branches, one line each, grouped by call; one is chosen, one may be marked."""

    def on_resize(self) -> None:
        self.call_after_refresh(self.scroll_to_highlight)  # it may be out of sight now

    def show(self, views: Sequence[BranchView], chosen: int, marked: str) -> None:
        """Draws what has changed. Posts no message about a choice that it was told."""
        layout = RowLayout.of(views, max(20, self.scrollable_content_region.width))
        groups: dict[str, list[BranchView]] = {}
        for view in views:
            groups.setdefault(view.group, []).append(view)
        rows: list[tuple[str, Text]] = []
        last = ""
        for index, view in enumerate(views):
            if view.depth == 0 and view.group != last:
                last = view.group
                if last:
                    rows.append((f"{GROUP_PREFIX}{last}", group_text(groups[last], layout.width)))
            is_chosen, is_marked = index == chosen, view.name == marked
            text = row_text(view, layout, index + 1, is_marked=is_marked, is_chosen=is_chosen)
            rows.append((view.name, text))
        shown = [self.get_option_at_index(index).id for index in range(self.option_count)]
        with self.prevent(OptionList.OptionHighlighted):
            if shown == [name for name, _ in rows]:
                for index, (_, text) in enumerate(rows):
                    self.replace_option_prompt_at_index(index, text)
            else:
                self.clear_options()
                self.add_options(
                    Option(text, id=name, disabled=name.startswith(GROUP_PREFIX))
                    for name, text in rows
                )
            if views:
                self.highlighted = self.get_option_index(views[chosen].name)


class Facts(Static):
    """What is known of one branch, in three lines."""

    def show(self, view: BranchView | None) -> None:
        """Draws them."""
        self.update(facts_text(view))


class Printed(RichLog):
    """What the chosen branch prints."""

    def __init__(self, name: str) -> None:
        super().__init__(id=name, wrap=True, max_lines=OUTPUT_LINES_MAX)

    def show(self, output: Output) -> None:
        """Adds a piece."""
        if output.is_first:
            self.clear()
        if not output.is_kept:
            self.write(Text("no output was saved", "dim"))
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
            said = for_caller(f"and {more} more: branching diff lists them")
            lines.append(Option(said, disabled=True))
        self.clear_options()
        self.add_options(lines or [Option("none", disabled=True)])
        self.highlighted = 0 if changes else None

    def path(self, index: int) -> str | None:
        """Returns the path of a line, None if that is of none."""
        return self._paths[index] if index < len(self._paths) else None
