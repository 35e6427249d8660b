"""A branch in words, as `branching watch` shows it: in the tree, on its chip, beside the tree, and
each change."""

from __future__ import annotations

from rich.text import Text

from branching.fs import Change
from branching.tui.looks import duration, letter, mark, money, plain, shortened, style, word
from branching.tui.observation import Sight

TREE_WIDTH = 34
PARENT_SUFFIX = ".parent"
"""Of the branch in which the parent of a fork goes on (see `agent.open_fork`)."""
_GOES_ON = {"chat": "branching chat", "fork": "branching fork --resume"}
"""Commands whose forks outlive them."""


def change_text(change: Change) -> Text:
    """Returns the line of a changed path."""
    counted = f"  +{change.lines[0]} -{change.lines[1]}" if change.lines else ""
    origin = f" (from {change.origin})" if change.origin else ""
    return Text(plain(f"{letter(change.change)} {change.path}{origin}{counted}"), no_wrap=True)


def chip_name(sight: Sight) -> str:
    """Returns a chip's name: of a call's candidates the number tells more than the name does."""
    if sight.entry is not None and sight.entry.index >= 0:
        return f"{sight.entry.index}:{shortened(plain(sight.label), 12)}"
    return shortened(plain(sight.name), 14)


def tree_text(sight: Sight, marked: str) -> Text:
    """Returns the two lines of a branch in the tree; `marked` is the one to compare with."""
    indent = "  " * sight.depth
    width = TREE_WIDTH - 3
    sign = "*" if sight.name == marked else " "
    state = word(sight.state)
    room = width - len(indent) - len(state) - 4
    name = shortened(plain(sight.name), max(8, room))
    look = style(sight.state)
    text = Text(no_wrap=True, overflow="crop")
    text.append(f"{sign}{indent}{mark(sight.state)} ", look)
    text.append(f"{name} ", "" if sight.record else "dim")
    text.append(f"{state}\n", look)
    entry = sight.entry
    facts = [duration(sight.seconds)] if entry is not None else []
    if entry is not None and entry.score is not None:
        facts.append(f"score {entry.score:.2f}")
    if entry is not None and entry.cost_usd:
        facts.append(money(entry.cost_usd))
    facts += [sight.changes] if sight.changes else []
    text.append(f" {indent}  {' '.join(facts)}", "dim")
    return text


def facts_text(sight: Sight | None) -> Text:
    """Returns the lines about the chosen branch: name, what is tried in it, its place."""
    facts = Text(no_wrap=True, overflow="ellipsis")
    if sight is None:
        facts.append("no branch yet: what is tried here will show up", "dim")
        return facts
    facts.append(f"{plain(sight.name)}\n", "bold")
    if sight.state == "lost":
        facts.append(f"{_lost(sight)}\n", style("lost"))
    facts.append(plain(sight.label) or _unlabelled(sight))
    if sight.record is not None and sight.state != "lost":
        facts.append(f"\n{plain(sight.record.branch_path)}", "dim")
    return facts


def _unlabelled(sight: Sight) -> str:
    if sight.name.endswith(PARENT_SUFFIX):
        return "where the parent of a fork goes on; it ends with the fork"
    return "made by a program that keeps no log"


def _lost(sight: Sight) -> str:
    if sight.record is None:
        return "its program was killed, and the branch is gone"
    if sight.is_dropped_next:
        return "its MCP server was killed, the next drops it: k keep, c commit"
    if sight.entry is not None and sight.entry.command in _GOES_ON:
        return f"its program was killed: {_GOES_ON[sight.entry.command]} goes on with it"
    return "its program was killed: d what it wrote, c commit, a drop"
