"""Text formatting: marks and colours of states, and sanitized output of other programs.

Every state has a mark and a word, so that no information depends on colour. Widths are in terminal
cells: a wide character has two.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size

from branching._caller import for_caller

if TYPE_CHECKING:
    from branching.agent.types import BranchCost, ForkCostSummary

LETTERS = {"added": "A", "modified": "M", "deleted": "D", "renamed": "R", "type": "T"}
MARKS = {
    "open": "○",
    "running": "●",
    "paused": "‖",
    "done": "✓",
    "succeeded": "✓",
    "kept": "✓",
    "won": "★",
    "failed": "✗",
    "error": "✗",
    "timed_out": "⊘",
    "cancelled": "⊘",
    "terminated": "⊘",
    "stale": "⊘",
    "lost": "?",
    "budget_exhausted": "$",
    "aggregate_budget_exhausted": "$$",
}
"""One for each state of a branch."""

_WORDS = {"aggregate_budget_exhausted": "agg-exhausted"}

_STYLES = {
    "running": "cyan",
    "paused": "yellow",
    "done": "green",
    "succeeded": "green",
    "kept": "green",
    "won": "bold green",
    "failed": "red",
    "error": "red",
    "lost": "red",
    "timed_out": "yellow",
}

_ESCAPES = re.compile(
    r"\x1b\[(?P<parameters>[0-9;:<=>?]*)[ -/]*(?P<final>[@-~])"  # CSI: of these SGR may stay
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # OSC, DCS, SOS, PM, APC with all they carry
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f"
    r"\u200e\u200f\u202a-\u202e\u2066-\u2069]"  # these turn the direction of what follows
)
_NO_TEXT = re.compile(r"[\ud800-\udfff]")
"""Matches bytes of a name that is not UTF-8."""


def mark(state: str) -> str:
    """Returns the mark of a state."""
    return MARKS.get(state, "·")


def style(state: str) -> str:
    """Returns the colour of a state."""
    return _STYLES.get(state, "dim" if state in MARKS and state != "open" else "")


def word(state: str) -> str:
    """Returns the state as people read it."""
    return _WORDS.get(state, state.replace("_", " "))


def plain(text: str) -> str:
    """Returns what others wrote without anything that a terminal would obey, on one line."""
    text = text.replace("\n", " ").replace("\t", "    ")
    return _NO_TEXT.sub("\ufffd", _CONTROLS.sub("", _ESCAPES.sub("", text)))


def coloured(line: str) -> str:
    """Returns a sanitized line of output with its colours.

    For a line that was overwritten (a progress bar), only the last state is returned.
    """
    last = line.rstrip("\r").rpartition("\r")[2]

    def kept(match: re.Match[str]) -> str:
        is_colour = match["final"] == "m" and re.fullmatch(r"[0-9;:]*", match["parameters"] or "")
        return match[0] if is_colour else ""

    return _CONTROLS.sub("", _ESCAPES.sub(kept, last.expandtabs()))


def shortened(text: str, width: int) -> str:
    """Cuts a text to a width, and shows that it was cut. Names differ at their ends."""
    if cell_len(text) <= width:
        return text
    if width < 6:
        return _head(text, width)
    tail = text[-(width // 2) :]
    while cell_len(tail) > width // 2:
        tail = tail[1:]
    return _head(text, width - cell_len(tail) - 1) + "…" + tail


def filled(text: str, width: int) -> str:
    """Truncates with an ellipsis, or pads, `text` to exactly `width` cells."""
    if cell_len(text) > width > 0:
        return _head(text, width - 1) + "…"
    return set_cell_size(text, width)


def _head(text: str, width: int) -> str:
    return set_cell_size(text[: 4 * width], width)  # the rest need not be measured


def duration(seconds: float) -> str:
    """`7.1s`, `2m05s`, `1h02m`."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02}s"
    return f"{minutes // 60}h{minutes % 60:02}m"


def money(usd: float | None) -> str:
    """Returns a cost as `$0.03`, with more digits if it is small; "" if it is unknown."""
    if usd is None:
        return ""
    return f"${usd:.4f}" if 0 < usd < 0.01 else f"${usd:.2f}"


def turns_text(count: int) -> str:
    """Returns "1 turn", "2 turns"."""
    return f"{count} turn" if count == 1 else f"{count} turns"


def letter(change: str) -> str:
    """Returns the sign of a kind of change; that of attributes alone is a small one."""
    return LETTERS.get(change, "m")


def failure(error: BaseException) -> str:
    """Returns what an error says, and what to do about it."""
    text = getattr(error, "message", "") or str(error) or type(error).__name__
    hint = getattr(error, "hint", None)
    return for_caller(f"{text} ({hint})" if hint else text)


def costs_text(cost: ForkCostSummary) -> str:
    """Returns a line for each branch, and one for all: dollars, and the budgets."""
    lines = [f"{each.branch_label}: {_cost_text(each)} ({each.state})" for each in cost.per_branch]
    budget = cost.aggregate_budget_usd
    total = money(cost.aggregate_usd) or "unknown"
    return "\n".join([*lines, f"together: {total}" + (f" of {money(budget)}" if budget else "")])


def usage_text(cost: ForkCostSummary) -> str:
    """Returns the same for tokens and requests."""
    lines = [
        f"{each.branch_label}: {each.tokens} tokens, {each.requests} requests ({each.state})"
        for each in cost.per_branch
    ]
    return "\n".join([*lines, f"together: {sum(each.tokens for each in cost.per_branch)} tokens"])


def _cost_text(cost: BranchCost) -> str:
    budget = "" if cost.budget_usd is None else f" of {money(cost.budget_usd)}"
    return (money(cost.cumulative_usd) or "price unknown") + budget
