"""A branch in words, as `branching watch` shows it: in the tree, on its chip, and each change."""

from __future__ import annotations

from rich.text import Text

from branching.fs import Change
from branching.tui.looks import duration, letter, mark, money, plain, shortened, style, word
from branching.tui.observation import Sight

TREE_WIDTH = 34


def change_text(change: Change) -> Text:
    """Returns the line of a changed path."""
    counted = f"  +{change.lines[0]} -{change.lines[1]}" if change.lines else ""
    origin = f" (from {change.origin})" if change.origin else ""
    return Text(plain(f"{letter(change.change)} {change.path}{origin}{counted}"), no_wrap=True)


def chip_name(sight: Sight) -> str:
    """Returns a chip's name: of a call's candidates the number tells more than the name does."""
    if sight.entry is not None and sight.entry.index >= 0:
        return f"{sight.entry.index}:{shortened(plain(sight.label), 12)}"
    return shortened(sight.name, 14)


def tree_text(sight: Sight, marked: str) -> Text:
    """Returns the two lines of a branch in the tree; `marked` is the one to compare with."""
    indent = "  " * sight.depth
    width = TREE_WIDTH - 3
    sign = "*" if sight.name == marked else " "
    state = word(sight.state)
    room = width - len(indent) - len(state) - 4
    name = shortened(sight.name, max(8, room))
    look = style(sight.state)
    text = Text(no_wrap=True, overflow="crop")
    text.append(f"{sign}{indent}{mark(sight.state)} ", look)
    text.append(f"{name} ", "" if sight.record else "dim")
    text.append(f"{state}\n", look)
    entry = sight.entry
    facts = [duration(sight.seconds)] if entry is not None else []
    if entry is not None and entry.score is not None:
        facts.append(f"score {entry.score:.2f}")
    if entry is not None and entry.cost_usd is not None:
        facts.append(money(entry.cost_usd))
    facts += [sight.changes] if sight.changes else []
    text.append(f" {indent}  {' '.join(facts)}", "dim")
    return text
