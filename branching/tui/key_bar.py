"""The last line of a screen: the keys that apply now."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual.widgets import Static


class KeyBar(Static):
    """As many keys as there is room for; those for help and leaving come first."""

    DEFAULT_CSS = "KeyBar { height: 1; text-wrap: nowrap; }"

    def show(self, keys: Sequence[tuple[str, str]]) -> None:
        """Draws them."""
        self.update(keys_text(keys, self.size.width or 80))


def keys_text(keys: Sequence[tuple[str, str]], width: int) -> Text:
    """Returns the keys that fit whole into a width."""
    text = Text(no_wrap=True)
    for key, meaning in keys:
        gap = "  " if len(text) else ""
        if len(text) + len(gap) + len(key) + 1 + len(meaning) > width:
            continue
        text.append(gap)
        text.append(key, "bold")
        text.append(f" {meaning}")
    return text
