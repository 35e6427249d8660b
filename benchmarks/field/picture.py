"""The race as a picture: for each row that native has, a bar for each contestant's ratio to native.

The scale is logarithmic, from a quarter to a thousand: twice as slow is equally far anywhere.
"""

from __future__ import annotations

import math
from xml.sax.saxutils import escape

from .report import runs_made

LEAST, MOST = 0.25, 1000.0
_LABELS, _SCALE, _VALUES, _BAR, _GAP = 250, 520, 90, 11, 12
_COLOURS = ("#1b7837", "#5aae61", "#2166ac", "#92c5de", "#b2182b", "#f4a582", "#999999", "#666666")


def bars(document: dict[str, object]) -> str:
    """Returns the document's ratios as an SVG; nothing is in it that the document has not."""
    rows: dict[str, list[tuple[str, float]]] = {}
    workloads = document["workloads"]
    assert isinstance(workloads, list)
    for workload in workloads:
        for figure in workload["figures"]:
            if "ratio" in figure and figure["contestant"] != "native":
                found = rows.setdefault(figure["row"], [])
                found.append((figure["contestant"], figure["ratio"]["median"]))
    names = list(dict.fromkeys(name for found in rows.values() for name, _ in found))
    colours = {name: _COLOURS[place % len(_COLOURS)] for place, name in enumerate(names)}

    parts: list[str] = []
    beside = _LABELS - 8
    x = 10
    for name in names:
        parts.append(f'<rect x="{x}" y="10" width="11" height="11" fill="{colours[name]}"/>')
        parts.append(f'<text x="{x + 16}" y="20">{escape(name)}</text>')
        x += 40 + 7 * len(name)
    y = 50
    for row, found in rows.items():
        middle = y + len(found) * _BAR / 2 + 4
        parts.append(f'<text x="{beside}" y="{middle:.0f}" text-anchor="end">{escape(row)}</text>')
        for name, ratio in found:
            end = _place(ratio)
            left, width = min(_place(1), end), max(abs(end - _place(1)), 1)
            parts.append(
                f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="{_BAR - 1}" '
                f'fill="{colours[name]}"><title>{escape(name)}: {ratio:.2f}</title></rect>'
            )
            right = max(end, _place(1)) + 4
            parts.append(f'<text x="{right:.1f}" y="{y + 9}" font-size="9">{ratio:.2g}</text>')
            y += _BAR
        y += _GAP
    grid = []
    for mark in (0.5, 1, 2, 5, 10, 100, 1000):
        at = _place(mark)
        colour = "#000" if mark == 1 else "#ddd"
        grid.append(f'<line x1="{at:.1f}" y1="40" x2="{at:.1f}" y2="{y}" stroke="{colour}"/>')
        grid.append(f'<text x="{at:.1f}" y="36" text-anchor="middle" fill="#555">{mark:g}</text>')
    width, height = max(_LABELS + _SCALE + _VALUES, x), y + 24
    title = f"Time as a multiple of native, median of {runs_made(document)}; less is better"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11"><title>{escape(title)}</title>\n'
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n'
        + "\n".join(grid + parts)
        + f'\n<text x="10" y="{height - 8}" fill="#555">{escape(title)}</text>\n</svg>\n'
    )


def _place(ratio: float) -> float:
    """Returns where a ratio lies on the scale; what is beyond its ends lies at them."""
    inside = min(max(ratio, LEAST), MOST)
    return _LABELS + _SCALE * math.log(inside / LEAST) / math.log(MOST / LEAST)
