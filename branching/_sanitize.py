"""Sanitizes output and file names of untrusted programs for a terminal.

Control sequences could set the terminal's title, clear the screen, fill the clipboard or hide
output. Colours are kept; other control characters are replaced by a visible form, such as `^[` for
escape. Pipes and files get the original bytes.
"""

from __future__ import annotations

import os
import re
from typing import TextIO

_COLOUR = r"(\x1b\[[0-9;:]*m)"
_RESET = "\x1b[0m"
_DIRECTIONS = "\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""They make text look like another one."""
_SHOWN = (
    {code: f"^{chr(code ^ 0x40)}" for code in (*range(0x20), 0x7F)}
    | {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
    | {ord(each): f"\\u{ord(each):04x}" for each in _DIRECTIONS}
)
del _SHOWN[ord("\t")]


def visible(line: str) -> str:
    """Returns a line, without its end, as it may be shown. NO_COLOR takes the colours too."""
    parts = re.split(_COLOUR, line)
    if len(parts) == 1:
        return line.translate(_SHOWN)
    with_colours = not os.environ.get("NO_COLOR")
    shown = "".join(
        part.translate(_SHOWN) if place % 2 == 0 else part if with_colours else ""
        for place, part in enumerate(parts)
    )
    return shown + _RESET if with_colours else shown


def line_for(stream: TextIO, line: str) -> str:
    """Returns a line, without its end, as it may be written there: only terminals obey."""
    return visible(line) if stream.isatty() else line
