"""Sanitizes output and file names of untrusted programs for a terminal, or for a model.

Control sequences could set the terminal's title, clear the screen, fill the clipboard or hide
output. Colours are kept; other control characters are replaced by a visible form, such as `^[` for
escape. Pipes and files get the original bytes.
"""

from __future__ import annotations

import os
import re
from typing import TextIO

_COLOUR = r"(\x1b\[[0-9;:]*m)"
_SEQUENCE = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-OQ-WYZ\\`-~])"
"""Control sequences (CSI), titles and links (OSC), and escapes of two characters."""
_CONTROL = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
"""All but tabs and the ends of lines."""
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


def plain(text: str) -> str:
    """Returns text without control sequences, for a reader that is no terminal.

    Other control characters get their visible form; the ends of lines and tabs stay.
    """
    if re.search(_CONTROL, text) is None:
        return text
    return re.sub(_CONTROL, lambda found: _SHOWN[ord(found[0])], re.sub(_SEQUENCE, "", text))


def line_for(stream: TextIO, line: str) -> str:
    """Returns a line, without its end, as it may be written there: only terminals obey."""
    return visible(line) if stream.isatty() else line
