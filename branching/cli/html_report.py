"""The candidates of a call as one HTML page, for `--report FILE` and `branching log --html`.

The page needs no network and runs no script: it can be attached to a pull request, or stored by a
continuous integration service. What candidates printed and changed is escaped, and a policy in the
page forbids everything but its own styles. Its parts, from the top:

    verdict      what was committed, and how to undo it
    candidates   a row for each: state, time as a bar, score, resources, changes
    tree         which candidate continued which, or beat which; only of a search by levels and of
                 a tournament
    details      for each candidate its changes, old beside new, and its output

On a narrow screen rows become cards and the two sides of a change stand one above the other.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from branching._sanitize import visible
from branching.cli.side_by_side import FileDiff, Row, file_diffs
from branching.fs.store_files import read
from branching.runlog.patches import read_patch
from branching.runlog.run_log import Entry, read_entry

OUTPUT_BYTES_MAX = 64 << 10
"""Of the end of each candidate's output."""
ROWS_MAX = 2000
"""Of the changes of each candidate."""
_SUCCESSES = ("won", "succeeded", "done")
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_STYLE = """\
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif;
  --line: #8884; --dim: #777; --good: #1a7f37; --bad: #cf222e; --idle: #8250df;
  --added: #2da44e26; --deleted: #cf222e26; --panel: #8881 }
@media (prefers-color-scheme: dark) { :root { --dim: #999; --good: #3fb950; --bad: #f85149;
  --idle: #a371f7; --added: #2ea04333; --deleted: #f8514933 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 90rem; overflow-wrap: anywhere; padding: 1.5rem }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
h3 { font-size: 1rem; margin: 0; overflow-wrap: anywhere }
code, pre, .diff { font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, monospace }
.facts, .none, figcaption { color: var(--dim) }
.verdict { border-left: .3rem solid var(--bad); margin: 1rem 0; padding: .3rem 0 .3rem .8rem }
.verdict.won { border-color: var(--good) }
table { border-collapse: collapse; width: 100% }
.race th { color: var(--dim); font-weight: 500; text-align: left }
.race th, .race td { border-bottom: 1px solid var(--line); padding: .4rem .8rem .4rem 0;
  vertical-align: top }
.race .n { font-variant-numeric: tabular-nums; text-align: right; white-space: nowrap }
.race .label { overflow-wrap: anywhere; width: 35% }
.race a { color: inherit; text-decoration-color: var(--dim) }
.state { color: var(--bad); white-space: nowrap }
.state.good { color: var(--good) } .state.idle { color: var(--idle) }
tr.won .label, .tree .won { font-weight: 600 }
.time { min-width: 9rem }
.bar { background: var(--panel); border-radius: 2px; display: block; height: .4rem;
  margin-top: .2rem }
.bar i { background: var(--dim); border-radius: 2px; display: block; height: 100%;
  min-width: 2px } tr.won .bar i { background: var(--good) }
.tree, .tree ul { list-style: none; margin: 0; padding: 0 }
.tree ul { padding-left: 1.4rem }
.tree li { padding: .15rem 0 .15rem 1.1rem; position: relative }
.tree li::before { border: solid var(--line); border-width: 0 0 1px 1px; content: "";
  height: 1rem; left: 0; position: absolute; top: 0; width: .8rem }
.tree li:not(:last-child)::after { border-left: 1px solid var(--line); bottom: 0; content: "";
  left: 0; position: absolute; top: 1rem }
section { border: 1px solid var(--line); border-radius: .4rem; margin: 0 0 1rem; padding: .8rem }
figure { margin: .6rem 0 0 } figcaption { overflow-wrap: anywhere }
.diff { border: 1px solid var(--line); table-layout: fixed }
.diff td { overflow-wrap: anywhere; padding: 0 .5rem; vertical-align: top; white-space: pre-wrap }
.diff .no { color: var(--dim); overflow-wrap: normal; padding: 0 .4rem; text-align: right;
  user-select: none; width: 3.4rem }
.diff .add { background: var(--added) } .diff .del { background: var(--deleted) }
.diff .gap td { background: var(--panel); color: var(--dim); text-align: center }
details { margin-top: .6rem } summary { cursor: pointer }
pre { background: var(--panel); margin: .4rem 0 0; max-height: 30rem; overflow: auto;
  overflow-wrap: anywhere; padding: .6rem; white-space: pre-wrap }
@media (max-width: 50rem) {
  body { padding: .8rem }
  .race, .race tbody, .race tr, .race td { display: block; width: auto }
  .race thead { display: none }
  .race tr { border: 1px solid var(--line); border-radius: .4rem; margin-bottom: .6rem;
    padding: .4rem .8rem }
  .race td { border: 0; display: flex; gap: 1rem; justify-content: space-between; padding: .1rem 0 }
  .race td::before { color: var(--dim); content: attr(data-name); flex: none }
  .race td:empty { display: none }
  .race .label { text-align: right; width: auto } .race .label a { min-width: 0 }
  .race .bar { align-self: center; flex: 1; margin: 0 }
  .diff, .diff tbody { display: block }
  .diff .no { width: auto }
  .diff tr { display: grid; grid-template-columns: 3rem 1fr }
  .diff .void, .diff .same .right { display: none }
  .diff .gap td { grid-column: 1 / 3 }
}
@media print {
  :root { color-scheme: light; font-size: 11px }
  body { max-width: none; padding: 0 }
  pre { max-height: none }
  .race tr, .tree li, h2, h3, figcaption { break-inside: avoid } h2, h3 { break-after: avoid }
  .bar i, .diff .add, .diff .del { print-color-adjust: exact }
}
"""
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<h1>{title}</h1>
<p class="facts">{facts}</p>
{verdict}
<h2>Candidates</h2>
<table class="race">
<thead><tr>{head}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
{tree}<h2>Changes and output</h2>
{details}
</body>
</html>"""


def report_of(logs: Path, branches: Sequence[str]) -> bytes | None:
    """Returns the page about these branches, or None if none of them has an entry in the log.

    Args:
        logs: The directory of the logs.
        branches: Names of branches.

    Raises:
        OSError: A log or a patch cannot be read.
    """
    found = [read_entry(logs / f"{branch}.json") for branch in branches]
    entries = [entry for entry in found if entry is not None]
    if not entries:
        return None
    outputs = {entry.branch: read_output(logs, entry.branch) for entry in entries}
    return html_report(logs, entries, outputs).encode("utf-8", "replace") + b"\n"


def read_output(logs: Path, branch: str) -> bytes:
    """Returns what a candidate printed, or nothing if its log was removed to make room."""
    try:
        return read(logs / f"{branch}.log")
    except FileNotFoundError:
        return b""


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
    columns = _columns(entries)
    return _PAGE.format(
        title=escape(f"branching {first.command}: {name}"),
        style=_STYLE,
        facts=_facts(entries),
        verdict=_verdict(entries),
        head="".join(f"<th{mark}>{title}</th>" for title, mark, _ in columns),
        rows="\n".join(_row(columns, entry) for entry in entries),
        tree=_tree(entries),
        details="\n".join(
            _details(entry, read_patch(logs, entry.branch), outputs[entry.branch])
            for entry in entries
        ),
    )


def _facts(entries: Sequence[Entry]) -> str:
    begin, end = _span(entries)
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(begin))
    count = f"{len(entries)} candidate{'s' * (len(entries) != 1)}"
    costs = [entry.cost_usd for entry in entries if entry.cost_usd is not None]
    cost = f" · ${sum(costs):.4f}" if costs else ""
    return f"{when} · {count} · {end - begin:.1f} s{cost}"


def _span(entries: Sequence[Entry]) -> tuple[float, float]:
    """Returns when the first candidate started and the last one ended."""
    return (
        min(entry.started for entry in entries),
        max(entry.started + entry.seconds for entry in entries),
    )


def _verdict(entries: Sequence[Entry]) -> str:
    winners = [entry for entry in entries if entry.state == "won"]
    if not winners:
        return '<p class="verdict">Nothing was committed.</p>'
    names = ", ".join(f"<b>{_heading(entry)}</b>" for entry in winners)
    undo = "<code>branching undo</code> reverts the last commit."
    return f'<p class="verdict won">Committed: {names}. {undo}</p>'


# The table.


def _columns(entries: Sequence[Entry]) -> list[tuple[str, str, dict[str, str]]]:
    """Returns title, class and cells by branch of each column. One without content is left out."""
    begin, end = _span(entries)
    number = ' class="n"'
    columns = [
        ("#", number, {each.branch: str(each.index) for each in entries}),
        ("candidate", ' class="label"', {each.branch: _link(each) for each in entries}),
        ("state", "", {each.branch: _state(each) for each in entries}),
        ("time", ' class="time"', {each.branch: _time(each, begin, end) for each in entries}),
        ("score", number, {each.branch: _number(each.score, "{:.2f}") for each in entries}),
        ("CPU", number, {each.branch: _number(each.cpu_seconds, "{:.1f} s") for each in entries}),
        ("memory", number, {each.branch: _size(each.memory_peak_bytes) for each in entries}),
        ("cost", number, {each.branch: _number(each.cost_usd, "${:.4f}") for each in entries}),
        ("changes", "", {each.branch: _text(each.changes) for each in entries}),
    ]
    return [column for column in columns if any(column[2].values())]


def _row(columns: Sequence[tuple[str, str, dict[str, str]]], entry: Entry) -> str:
    mark = ' class="won"' if entry.state == "won" else ""
    cells = (
        f'<td{kind} data-name="{title}">{cells[entry.branch]}</td>'
        for title, kind, cells in columns
    )
    return f"<tr{mark}>{''.join(cells)}</tr>"


def _link(entry: Entry) -> str:
    return f'<a href="#{escape(entry.branch)}">{_text(entry.label)}</a>'


def _state(entry: Entry) -> str:
    kind = " good" if entry.state in _SUCCESSES else " idle" * (entry.state == "cancelled")
    mark = "✓" if entry.state in _SUCCESSES else "○" if entry.state == "cancelled" else "✗"
    return f'<span class="state{kind}">{mark} {_text(entry.state.replace("_", " "))}</span>'


def _time(entry: Entry, begin: float, end: float) -> str:
    """Returns the time as a number, and as a bar within that of the whole call."""
    whole = max(end - begin, 1e-9)
    left = 100 * (entry.started - begin) / whole
    width = 100 * entry.seconds / whole
    bar = f'<i style="margin-left:{left:.1f}%;width:{width:.1f}%"></i>'
    return f'<span>{entry.seconds:.1f} s</span><span class="bar">{bar}</span>'


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _size(count: int | None) -> str:
    if count is None:
        return ""
    if count < 1 << 30:
        return f"{count / (1 << 20):.1f} MiB"
    return f"{count / (1 << 30):.2f} GiB"


# The tree.


def _tree(entries: Sequence[Entry]) -> str:
    """Returns the candidates by what they continued or whom they beat; "" if that is nothing."""
    by_index = {entry.index: entry for entry in entries}
    below: dict[int, list[int]] = {}
    for entry in entries:
        if entry.predecessor in by_index:
            below.setdefault(entry.predecessor, []).append(entry.index)
        losers = [loser for loser in reversed(entry.beaten) if loser in by_index]
        if losers:
            below.setdefault(entry.index, []).extend(losers)
    if not below:
        return ""
    is_tournament = any(entry.beaten for entry in entries)
    what = "Each candidate is shown above the candidates that it was judged better than."
    if not is_tournament:
        what = "Each candidate started from the result of the candidate above it."
    children = {index for indexes in below.values() for index in indexes}
    roots = [entry.index for entry in entries if entry.index not in children]
    seen: set[int] = set()

    def nodes(indexes: Sequence[int]) -> str:
        found = []
        for index in indexes:
            if index in seen:  # a log can be changed by hand
                continue
            seen.add(index)
            entry = by_index[index]
            under = nodes(below.get(index, ()))
            score = "" if entry.score is None else f" · {entry.score:.2f}"
            mark = ' class="won"' if entry.state == "won" else ""
            text = f"<span{mark}>{_heading(entry)}</span> {_state(entry)}{score}"
            found.append(f"<li>{text}{f'<ul>{under}</ul>' if under else ''}</li>")
        return "\n".join(found)

    title = "Rounds" if is_tournament else "Levels"
    return f'<h2>{title}</h2>\n<p class="facts">{what}</p>\n<ul class="tree">{nodes(roots)}</ul>\n'


# Changes and output.


def _details(entry: Entry, patch: bytes | None, output: bytes) -> str:
    return (
        f'<section id="{escape(entry.branch)}"><h3>{_heading(entry)} {_state(entry)}</h3>\n'
        f"{_changes(entry, patch)}\n{_output(output)}</section>"
    )


def _changes(entry: Entry, patch: bytes | None) -> str:
    if patch is None:
        return '<p class="none">No patch was saved.</p>'
    rows_left = ROWS_MAX
    figures = []
    for diff in file_diffs(patch.decode("utf-8", "replace")):
        if rows_left <= 0:
            how = f"<code>branching log --patch {escape(entry.branch)}</code>"
            figures.append(f'<p class="none">More changes are not shown; {how} prints them.</p>')
            break
        figures.append(_figure(diff, rows_left))
        rows_left -= len(diff.rows) + 1
    return "\n".join(figures)


def _figure(diff: FileDiff, rows_max: int) -> str:
    counts = f" +{diff.added} -{diff.deleted}" if diff.rows else ""
    named = f"<b>{_text(diff.name)}</b>{counts}" if diff.name else ""
    caption = "<br>".join([*([named] if named else []), *map(_text, diff.notes)])
    shown = diff.rows[:rows_max]
    rows = "".join(map(_diff_row, shown))
    if len(shown) < len(diff.rows):
        rows += (
            f'<tr class="gap"><td colspan="4">{len(diff.rows) - len(shown)} lines more</td></tr>'
        )
    table = f'<table class="diff"><tbody>{rows}</tbody></table>' if rows else ""
    return f"<figure><figcaption>{caption}</figcaption>{table}</figure>"


def _diff_row(row: Row) -> str:
    if row.kind == "gap":
        return '<tr class="gap"><td colspan="4">⋯</td></tr>'
    marks = ("del", "add") if row.kind == "changed" else ("", "")
    cells = _side(row.old, marks[0], "left") + _side(row.new, marks[1], "right")
    return f'<tr class="{row.kind}">{cells}</tr>'


def _side(line: tuple[int, str] | None, mark: str, side: str) -> str:
    if line is None:
        return f'<td class="no void {side}"></td><td class="void {side}"></td>'
    number, text = line
    kind = f"{mark} {side}".strip()
    return f'<td class="no {kind}">{number}</td><td class="{kind}">{_text(text)}</td>'


def _output(output: bytes) -> str:
    if not output:
        return '<p class="none">No output.</p>'
    end = output[-OUTPUT_BYTES_MAX:]
    lines = end.decode("utf-8", "replace").splitlines()
    if len(end) < len(output):
        lines[0] = f"[{len(output) - len(end)} bytes are left out]"
    count = f"{len(lines)} line{'s' * (len(lines) != 1)}"
    text = "\n".join(map(_text, lines))
    return f"<details open><summary>Output, {count}</summary><pre>{text}</pre></details>"


def _heading(entry: Entry) -> str:
    return f"{entry.index}: {_text(entry.label)}"


def _text(line: str) -> str:
    """Returns a line as text of the page, without colours, control characters shown."""
    return escape(visible(_COLOUR.sub("", line)))
