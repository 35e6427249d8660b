"""The part of a page that a race fills: all figures in it come from one document."""

from __future__ import annotations

from pathlib import Path

from .goals import OURS, listener, verdicts
from .report import readable, runs_made, table

BEGIN = "<!-- figures: written by scripts/bench, see --page -->"
END = "<!-- end of the figures -->"


class NoPlace(Exception):
    """A page has no place for figures, or more than one."""


def around(page: Path) -> tuple[str, str]:
    """Returns what is before and after the figures of `page`; raises NoPlace without marks."""
    try:
        text = page.read_text()
    except OSError as error:
        raise NoPlace(f"{page} cannot be read: {error.strerror}") from error
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise NoPlace(f"{page} has not one line each: {BEGIN} and, after it, {END}")
    return text.split(BEGIN)[0], text.split(END)[1]


def fill(page: Path, document: dict[str, object]) -> None:
    """Replaces what is between the two marks of `page`; raises NoPlace without them."""
    before, after = around(page)
    page.write_text(f"{before}{BEGIN}\n{figures(document)}\n{END}{after}")


def figures(document: dict[str, object]) -> str:
    """Returns conditions, goals and tables as Markdown."""
    return "\n".join(
        [*_conditions(document), *_goals(document), *_listener(document), table(document)]
    )


def _conditions(document: dict[str, object]) -> list[str]:
    machine = document["machine"]
    assert isinstance(machine, dict)
    load = " ".join(f"{value:.1f}" for value in machine["load_before"])
    done = f"`--mode {document['mode']}`, {runs_made(document)} of each"
    said = (
        f"{done}, at commit {machine['commit']}, {machine['date']}: {machine['processors']} "
        f"processors ({machine['model']}), {machine['memory_mib']} MiB, Linux {machine['kernel']}, "
        f"{machine['file_system']}. Load before it began, over 1, 5 and 15 minutes: {load}."
    )
    return [said, ""]


def _goals(document: dict[str, object]) -> list[str]:
    rows: dict[str, dict[str, str]] = {}
    for verdict in verdicts(document):
        if verdict.in_seconds:
            found, most = readable(verdict.found, "s"), readable(verdict.most, "s")
        else:
            found, most = f"{verdict.found:.2f}", f"{verdict.most:g}"
        shown = f"**{found}, missed:** {most}" if verdict.is_missed else f"{found} ({most})"
        rows.setdefault(verdict.row, {})[verdict.contestant] = shown
    if not rows:
        return []
    lines = [
        "### Goals",
        "",
        "Medians, as multiples of native or as times, and what is the most that was promised.",
        "",
        "| work | overlay | fuse |",
        "|---|--:|--:|",
    ]
    for row, shown_by in rows.items():
        cells = [row, *(shown_by.get(name, "") for name in OURS)]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _listener(document: dict[str, object]) -> list[str]:
    found = list(listener(document))
    if not found:
        return []
    lines = ["### Where a peer is ahead", ""]
    lines += [f"- {row}: {name} takes {times:.1f} times {peer}" for row, name, peer, times in found]
    return [*lines, ""]
