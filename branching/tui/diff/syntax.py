"""Syntax colours of the lines of a comparison, in the colours that the terminal has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.syntax import Syntax
from rich.text import Text

from branching.tui.diff.line_diff import Comparison, Row
from branching.tui.formatting import plain

THEME = "ansi_dark"
LINE_CHARACTERS_MAX = 1000
"""A longer line has no colours: it is data, and takes long."""

Colours = Sequence[tuple[Text | None, Text | None]]
"""For each row its left and its right line; None where there is none."""


def syntax_colours(comparison: Comparison) -> Colours:
    """Colours both sides by the language that the file's name tells. It may block.

    A line that is too long has an empty text in its place.

    The lines of a hunk are read together, so that a text of several lines is known as one where it
    begins in the hunk. A file of an unknown kind has no colours.
    """
    lexer = Syntax.guess_lexer(comparison.path)
    syntax = Syntax("", lexer, theme=THEME)
    rows = comparison.rows
    colours: list[tuple[Text | None, Text | None]] = []
    for hunk in _hunks(rows):
        left = _coloured(syntax, [row.left if row.kind != "hunk" else None for row in hunk])
        right = _coloured(syntax, [row.right for row in hunk])
        colours += zip(left, right, strict=True)
    return colours


def _hunks(rows: Iterable[Row]) -> Iterable[list[Row]]:
    hunk: list[Row] = []
    for row in rows:
        if row.kind == "hunk" and hunk:
            yield hunk
            hunk = []
        hunk.append(row)
    if hunk:
        yield hunk


def _coloured(syntax: Syntax, lines: Sequence[str | None]) -> list[Text | None]:
    shown = [None if line is None else plain(line) for line in lines]
    there = [line if len(line) <= LINE_CHARACTERS_MAX else "" for line in shown if line is not None]
    coloured = iter(syntax.highlight("\n".join(there)).split("\n", allow_blank=True))
    return [None if line is None else next(coloured) for line in shown]
