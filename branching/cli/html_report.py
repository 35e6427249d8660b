"""The candidates of a call as one HTML page: what `branching log --html` prints.

The page needs no network and runs no script: it can be attached to a pull request, or kept by a
continuous integration. What candidates printed and changed is escaped; a policy in the page forbids
everything but its own styles.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from branching._sanitize import visible
from branching.runlog.patches import read_patch
from branching.runlog.run_log import Entry

OUTPUT_BYTES_MAX = 64 << 10
"""Of the end of each candidate's output."""
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_STYLE = """\
:root { color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif }
body { margin: 2rem auto; max-width: 100rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
th, td { border-bottom: 1px solid #8885; padding: .3rem .8rem .3rem 0; text-align: left }
td { vertical-align: top; overflow-wrap: anywhere }
.n { text-align: right; white-space: nowrap }
.won { font-weight: bold }
.patches { display: grid; gap: 1rem; grid-auto-columns: minmax(30rem, 1fr); grid-auto-flow: column;
  overflow-x: auto }
pre { background: #8881; font: 13px/1.4 ui-monospace, monospace; overflow: auto; padding: .6rem }
.a { background: #2a63 } .d { background: #c333 } .h { color: #37c } .f { font-weight: bold }
"""
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<h1>{title}</h1>
<p>{summary}</p>
<table>
<thead><tr><th>#</th><th>candidate</th><th>state</th><th class="n">time</th><th class="n">score</th>
<th class="n">cost</th><th>changes</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
<h2>Changes</h2>
<div class="patches">
{patches}
</div>
<h2>Output</h2>
{outputs}
</body>
</html>"""


def html_report(logs: Path, entries: Sequence[Entry], outputs: Mapping[str, bytes]) -> str:
    """Returns the page.

    Args:
        logs: The directory of the logs, in which the patches are.
        entries: The candidates, at least one.
        outputs: What each candidate printed, by its branch.

    Raises:
        OSError: A patch cannot be read.
    """
    first = entries[0]
    name = first.call if len(entries) > 1 else first.branch
    return _PAGE.format(
        title=escape(f"branching {first.command}: {name}"),
        style=_STYLE,
        summary=_summary(entries),
        rows="\n".join(map(_row, entries)),
        patches="\n".join(_patch(entry, read_patch(logs, entry.branch)) for entry in entries),
        outputs="\n".join(_output(entry, outputs[entry.branch]) for entry in entries),
    )


def _summary(entries: Sequence[Entry]) -> str:
    winners = [f"<b>{_text(entry.label)}</b>" for entry in entries if entry.state == "won"]
    count = f"{len(entries)} candidate{'s' * (len(entries) != 1)}. "
    if not winners:
        return f"{count}None was committed."
    command = "<code>branching undo</code> takes the last commit back."
    return f"{count}Committed: {', '.join(winners)}. {command}"


def _row(entry: Entry) -> str:
    score = "" if entry.score is None else f"{entry.score:.2f}"
    cost = "" if entry.cost_usd is None else f"${entry.cost_usd:.4f}"
    state = entry.state.replace("_", " ")
    mark = ' class="won"' if entry.state == "won" else ""
    return (
        f"<tr{mark}><td>{entry.index}</td><td>{_text(entry.label)}</td><td>{_text(state)}</td>"
        f'<td class="n">{entry.seconds:.1f} s</td><td class="n">{score}</td>'
        f'<td class="n">{cost}</td><td>{_text(entry.changes)}</td></tr>'
    )


def _patch(entry: Entry, patch: bytes | None) -> str:
    lines = [] if patch is None else patch.decode("utf-8", "replace").split("\n")
    content = "\n".join(map(_patch_line, lines)) or "No patch is kept."
    return f"<section><h3>{_heading(entry)}</h3><pre>{content}</pre></section>"


def _patch_line(line: str) -> str:
    kinds = (("diff ", "f"), ("+++", "f"), ("---", "f"), ("@@", "h"), ("+", "a"), ("-", "d"))
    kind = next((kind for start, kind in kinds if line.startswith(start)), None)
    return _text(line) if kind is None else f'<span class="{kind}">{_text(line)}</span>'


def _output(entry: Entry, output: bytes) -> str:
    end = output[-OUTPUT_BYTES_MAX:]
    lines = end.decode("utf-8", "replace").splitlines()
    if len(end) < len(output):
        lines[0] = f"[{len(output) - len(end)} bytes are left out]"
    text = "\n".join(map(_text, lines)) or "Nothing."
    return f"<details><summary>{_heading(entry)}</summary><pre>{text}</pre></details>"


def _heading(entry: Entry) -> str:
    return f"{entry.index}: {_text(entry.label)}"


def _text(line: str) -> str:
    """Returns a line as text of the page, without colours, control characters shown."""
    return escape(visible(_COLOUR.sub("", line)))
