"""A branch in words, as `branching watch` shows it: in its row, below the rows, and each change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from branching._caller import for_caller
from branching.fs import Change
from branching.tui.formatting import (
    duration,
    filled,
    letter,
    mark,
    money,
    plain,
    shortened,
    style,
    word,
)
from branching.tui.watch.workspace_monitor import BranchView

NARROW_WIDTH = 60
"""Below this a row has neither time nor cost."""
STATE_WIDTH = 9
CHANGES_WIDTH = 8
INDENTS_MAX = 6
LAST_LINE_ROOM = 44
"""If the candidate has less room than this, the last line of output is left out."""
PARENT_SUFFIX = ".parent"
"""Suffix of the branch in which the parent of a fork continues."""
_GOES_ON = {"chat": "branching chat", "fork": "branching fork --resume"}
"""Commands whose forks outlive them."""


def change_text(change: Change) -> Text:
    """Returns the line of a changed path."""
    counted = f"  +{change.lines[0]} -{change.lines[1]}" if change.lines else ""
    origin = f" (from {change.origin})" if change.origin else ""
    return Text(plain(f"{letter(change.change)} {change.path}{origin}{counted}"), no_wrap=True)


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """Which columns the rows have."""

    width: int
    has_scores: bool = False
    has_costs: bool = False

    @staticmethod
    def of(views: Sequence[BranchView], width: int) -> RowLayout:
        """Returns the columns for these branches: a column that would be empty is left out."""
        entries = [view.entry for view in views if view.entry is not None]
        return RowLayout(
            width=width,
            has_scores=any(entry.score is not None for entry in entries),
            has_costs=any(entry.cost_usd for entry in entries),
        )


def row_text(
    view: BranchView,
    layout: RowLayout,
    number: int,
    *,
    is_marked: bool = False,
    is_chosen: bool = False,
) -> Text:
    """Returns the row of a branch: number, state, time, changes, score, cost, candidate, and the
    last line of its output, as far as there is room.

    The selected row has no colours: it is shown in the terminal's colours, reversed.
    """
    entry = view.entry
    look = style(view.state)
    cells: list[tuple[str, str]] = [
        (f"{number if number <= 9 else ' '}{'*' if is_marked else ' '}", "dim"),
        (f"{mark(view.state)} {filled(word(view.state), STATE_WIDTH)} ", look),
    ]
    if layout.width >= NARROW_WIDTH:
        cells.append((f"{duration(view.seconds) if entry else '':>6} ", ""))
    cells.append((f"{filled(view.changes, CHANGES_WIDTH)} ", ""))
    if layout.has_scores:
        score = "" if entry is None or entry.score is None else f"{entry.score:.2f}"
        cells.append((f"{score:>7} ", ""))
    if layout.has_costs and layout.width >= NARROW_WIDTH:
        cells.append((f"{money(entry.cost_usd) if entry and entry.cost_usd else '':>7} ", ""))
    room = max(8, layout.width - sum(cell_len(text) for text, _ in cells))
    cells.append((_tried(view, room), "" if view.record else "dim"))
    text = Text(no_wrap=True, overflow="crop")
    for content, of_cell in cells:
        text.append(content, "bold reverse" if is_chosen else of_cell)
    if is_chosen:
        text.append(" " * max(0, layout.width - text.cell_len), "bold reverse")
    return text


def _tried(view: BranchView, room: int) -> str:
    """Returns the candidate of a branch and its last line of output."""
    what = "  " * min(view.depth, INDENTS_MAX) + plain(view.name)
    if view.group and view.entry is not None:
        what = f"{view.entry.index} {plain(view.label)}"
    said = plain(view.last_line)
    if not said or room < LAST_LINE_ROOM:
        return shortened(what, room)
    half = room // 2
    return f"{filled(shortened(what, half - 2), half)}{shortened(said, room - half)}"


def group_text(views: Sequence[BranchView], width: int) -> Text:
    """Returns the line above the candidates of one call: its name, and how they are. Where that is
    too long, the name is cut first, then the states are shown by their marks."""
    states = Counter(view.state for view in views)
    counted = ", ".join(f"{count} {word(state)}" for state, count in states.items())
    marks = " ".join(f"{mark(state)}{count}" for state, count in states.items())
    call = plain(views[0].group)
    command = views[0].entry.command if views[0].entry else ""
    name = call if call.startswith(command) else f"{command} {call}"
    short = command or name
    forms = (f"{name}: {counted}", f"{short}: {counted}", f"{name}: {marks}", f"{short}: {marks}")
    fitting = [form for form in forms if cell_len(form) <= width]
    return Text(fitting[0] if fitting else shortened(forms[-1], width), "bold", no_wrap=True)


def facts_text(view: BranchView | None) -> Text:
    """Returns the lines about the selected branch: name, candidate, path."""
    facts = Text(no_wrap=True, overflow="ellipsis")
    if view is None:
        facts.append(for_caller("No branch is open. Try: branching run -- COMMAND"), "dim")
        return facts
    facts.append(f"{plain(view.name)}\n", "bold")
    if view.state == "lost":
        facts.append(f"{for_caller(_lost(view))}\n", style("lost"))
    facts.append(plain(view.label) or _unlabelled(view))
    if view.entry is not None and view.entry.node:
        facts.append(f"\non node {plain(view.entry.node)}", "dim")
    if view.record is not None and view.state != "lost":
        facts.append(f"\n{plain(view.record.branch_path)}", "dim")
    return facts


def _unlabelled(view: BranchView) -> str:
    if view.name.endswith(PARENT_SUFFIX):
        return "where the parent of a fork continues; it ends with the fork"
    return "made by a program that keeps no log"


def _lost(view: BranchView) -> str:
    if view.record is None:
        return "its program was killed, and the branch is gone"
    if view.is_dropped_next:
        return "its MCP server was killed, the next drops it: k keep, c commit"
    if view.entry is not None and view.entry.command in _GOES_ON:
        return f"its program was killed: {_GOES_ON[view.entry.command]} goes on with it"
    return "its program was killed: d what it wrote, c commit, a drop"
