"""The headline chart of docs/benchmarks.md, drawn from the tables of docs/benchmarks-full.md.

    python -m benchmarks.headline      writes docs/benchmarks-headline.svg

Five kinds of work, each with both drivers and without branches. The scale is logarithmic and spans
all values, so that no bar is cut. Colours follow the reader's colour scheme.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from xml.sax.saxutils import escape

DOCS = Path(__file__).parents[1] / "docs"
TABLES = DOCS / "benchmarks-full.md"
CHART = DOCS / "benchmarks-headline.svg"
TITLE = "Time of one operation, logarithmic scale; shorter is better"
ROWS = {
    "create a branch of 50000 files": ("fork 50 000 files", "cp -a"),
    "commit 10000 files of 4 KiB": ("commit 10 000 files", "native"),
    "git status, first in a fresh branch": ("first git status", "native"),
    "one byte in 1024 MiB, open to close": ("change one byte of 1 GiB", "native"),
    "pytest of click 8.1.7": ("pytest of click", "native"),
}
"""By the name in the tables: the label, and what the work takes without branches."""
SERIES = {"ours, fuse": "branching, FUSE", "ours, overlay": "branching, overlay"}
_UNITS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_LINE = re.compile(r"^\| ([^|]+) \| ([^|]+) \| [^|]+ \| ([\d.]+) (ns|µs|ms|s) \|", re.M)
_LEFT, _WIDTH, _RIGHT, _BAR, _GAP, _TOP = 190, 440, 130, 15, 16, 62
_STYLE = """\
text { fill: #1f2328; font: 13px system-ui, sans-serif } .dim { fill: #59636e; font-size: 12px }
.a { fill: #1a7f37 } .b { fill: #4ac26b } .c { fill: #8c959f }
@media (prefers-color-scheme: dark) { text { fill: #f0f6fc } .dim { fill: #9198a1 }
.a { fill: #3fb950 } .b { fill: #238636 } .c { fill: #6e7681 } }"""


def medians(page: str) -> dict[tuple[str, str], tuple[float, str]]:
    """Returns the median of each row and contestant, in seconds and as it is written."""
    return {
        (row, contestant): (float(number) * _UNITS[unit], f"{number} {unit}")
        for row, contestant, number, unit in _LINE.findall(page)
    }


def chart(page: str) -> str:
    """Returns the chart of a page's tables as an SVG. KeyError if one of its rows is missing."""
    found = medians(page)
    groups = []
    for row, (label, other) in ROWS.items():
        names = zip((*SERIES, other), "abc", strict=True)
        groups.append((label, [(*found[row, name], kind) for name, kind in names], other))
    values = [seconds for _, bars, _ in groups for seconds, _, _ in bars]
    least = math.log10(min(values)) - 0.3
    scale = _WIDTH / (math.log10(max(values)) - least)
    parts = [f'<text x="10" y="20">{escape(TITLE)}</text>']
    x = 10
    for label, kind in (*zip(SERIES.values(), "ab", strict=True), ("without branches", "c")):
        parts.append(f'<rect class="{kind}" x="{x}" y="34" width="11" height="11"/>')
        parts.append(f'<text class="dim" x="{x + 16}" y="44">{escape(label)}</text>')
        x += 46 + 7 * len(label)
    y = _TOP
    for label, bars, other in groups:
        middle = y + 1.5 * _BAR + 4
        parts.append(f'<text x="{_LEFT - 10}" y="{middle}" text-anchor="end">{label}</text>')
        for seconds, written, kind in bars:
            width = (math.log10(seconds) - least) * scale
            size = f'width="{width:.1f}" height="{_BAR - 2}"'
            parts.append(f'<rect class="{kind}" x="{_LEFT}" y="{y}" {size}/>')
            said = f"{written}, {other}" if kind == "c" else written
            at = f'x="{_LEFT + width + 6:.1f}" y="{y + 11}"'
            parts.append(f'<text class="dim" {at}>{said}</text>')
            y += _BAR
        y += _GAP
    size = f"{_LEFT + _WIDTH + _RIGHT} {y}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}"><title>{escape(TITLE)}'
        f"</title>\n<style>{_STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    CHART.write_text(chart(TABLES.read_text()))
