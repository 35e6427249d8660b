#!/usr/bin/env python3
"""Records the race of examples/race in a terminal, as docs/race.svg.

.venv/bin/python scripts/record.py                  runs the race and writes the picture
.venv/bin/python scripts/record.py --output FILE    writes it to another file

The commands run in a pseudo-terminal, in a copy of the example; pyte, a terminal emulator, turns their output into
screens. Only the typing is simulated. Needs `branching` and `branchfs` on PATH.

The picture is one SVG without scripts, fonts or references. A line of the screen is a group that a CSS animation shows
from the moment it appeared until it changed. Where nothing is animated (`prefers-reduced-motion`, or a viewer without
CSS animations) the last screen is shown. The colours follow `prefers-color-scheme`.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import select
import shutil
import struct
import subprocess
import tempfile
import termios
import time
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

import pyte

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "race"
PICTURE = ROOT / "docs" / "race.svg"
COMMANDS = [
    "branching speculate -c './agent-a && make test' \\\n"
    "                    -c './agent-b && make test' \\\n"
    "                    -c './agent-c && make test'",
    "tail -n 1 stats.py",
    "branching undo",
]
TITLE = "A race of three agents in branches of one directory"
DESCRIPTION = (
    "A terminal. The command branching speculate races three agents, each followed by make test. A table shows their "
    "states: agent a fails its test, agent b passes and is committed, agent c is cancelled. The repaired line is "
    "shown. The command branching undo then reverts the commit."
)

COLUMNS, ROWS = 92, 19
CELL_WIDTH, LINE_HEIGHT, MARGIN, BASELINE = 8.4, 19, 18, 14
TYPING_SECONDS = 0.09
"""For each word of a command."""
READING_SECONDS = 1.2
"""Between the end of a command and the next prompt."""
HOLD_SECONDS = 5.0
"""How long the last screen is shown before the animation starts again."""
QUIET_SECONDS = 0.015
"""A screen is complete when the terminal has been silent for this long."""
BETWEEN_SECONDS = 0.24
"""Between two screens that are kept while a command runs: its clock counts tenths."""
COMMAND_SECONDS_MAX = 60

DARK = {
    "back": "#0d1117",
    "edge": "#30363d",
    "text": "#e6edf3",
    "red": "#ff7b72",
    "green": "#56d364",
    "yellow": "#e3b341",
    "cyan": "#56d4dd",
}
LIGHT = {
    "back": "#ffffff",
    "edge": "#d0d7de",
    "text": "#1f2328",
    "red": "#c4232c",
    "green": "#116329",
    "yellow": "#7d4e00",
    "cyan": "#0b6a75",
}
COLOURS = {"red": "red", "green": "green", "brown": "yellow", "cyan": "cyan"}
"""What the emulator calls the colours that `branching` uses."""


@dataclass(frozen=True)
class Span:
    """Characters of one style, from a column on."""

    column: int
    text: str
    style: str


Line = tuple[Span, ...]


@dataclass
class Recording:
    """What the lines of a screen were, and since when."""

    screen: pyte.Screen = field(default_factory=lambda: pyte.Screen(COLUMNS, ROWS))
    seconds: float = 0.0
    """The time of the picture, without what is not shown."""
    shown: list[tuple[float, tuple[Line, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stream = pyte.ByteStream(self.screen)

    def write(self, text: str) -> None:
        """Writes text of the prompt's on the screen."""
        self.stream.feed(text.replace("\n", "\r\n").encode())

    def keep(self) -> None:
        """Keeps the screen as it is now."""
        lines = tuple(line_of(self.screen, row) for row in range(ROWS))
        if not self.shown or self.shown[-1][1] != lines:
            self.shown.append((self.seconds, lines))

    def type(self, command: str) -> None:
        """Types a command at the prompt, word by word."""
        self.write("$ ")
        self.keep()
        for number, word in enumerate(command.split(" ")):
            self.write(f"{' ' if number else ''}{word}")
            if word.strip():
                self.seconds += TYPING_SECONDS
                self.keep()
        self.seconds += TYPING_SECONDS
        self.write("\n")

    def run(self, command: str, directory: Path) -> None:
        """Runs a command in the terminal, as long as it takes."""
        outer, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
        environ.pop("NO_COLOR", None)
        with subprocess.Popen(
            ["sh", "-c", command],
            cwd=directory,
            env=environ,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
        ) as process:
            os.close(inner)
            self._follow(outer)
        os.close(outer)
        if process.returncode:
            raise SystemExit(f"record: {command!r} failed with exit code {process.returncode}")

    def _follow(self, terminal: int) -> None:
        started, began_at, kept_at = time.monotonic(), self.seconds, 0.0
        while (passed := time.monotonic() - started) < COMMAND_SECONDS_MAX:
            readable, _, _ = select.select([terminal], [], [], QUIET_SECONDS)
            if readable:
                try:
                    output = os.read(terminal, 65536)
                except OSError:  # how Linux reports that the other end is closed
                    output = b""
                if not output:
                    self.seconds = began_at + passed
                    self.keep()
                    return
                self.stream.feed(output)
            elif passed - kept_at >= BETWEEN_SECONDS:
                self.seconds, kept_at = began_at + passed, passed
                self.keep()
        raise SystemExit(f"record: a command took longer than {COMMAND_SECONDS_MAX} s")


def line_of(screen: pyte.Screen, row: int) -> Line:
    """Returns a line of the screen as spans of one style, without blanks between them."""
    spans: list[Span] = []
    cells = screen.buffer[row]
    for column in range(screen.columns):
        cell = cells[column]
        if cell.data.isspace():
            continue
        style = " ".join([COLOURS.get(cell.fg, "text"), *(["bold"] if cell.bold else [])])
        last = spans[-1] if spans else None
        if last and last.style == style and column - last.column - len(last.text) <= 1:
            blanks = " " * (column - last.column - len(last.text))
            spans[-1] = Span(last.column, last.text + blanks + cell.data, style)
        else:
            spans.append(Span(column, cell.data, style))
    return tuple(spans)


def drawn(line: Line, row: int) -> str:
    """Returns a line as SVG."""
    baseline = MARGIN + BASELINE + row * LINE_HEIGHT
    texts = []
    for span in line:
        x, width = MARGIN + span.column * CELL_WIDTH, len(span.text) * CELL_WIDTH
        texts.append(
            f'<text class="{span.style}" x="{x:.1f}" y="{baseline}" textLength="{width:.1f}">{escape(span.text)}</text>'
        )
    return "".join(texts)


def picture(recording: Recording) -> str:
    """Returns the recording as an animated SVG."""
    end = recording.seconds + HOLD_SECONDS
    rules: list[str] = []
    groups: list[str] = []
    for row in range(ROWS):
        since: list[tuple[float, Line]] = []
        for seconds, lines in recording.shown:
            if not since or since[-1][1] != lines[row]:
                since.append((seconds, lines[row]))
        for number, (start, line) in enumerate(since):
            if not line:
                continue
            is_last = number + 1 == len(since)
            name = f"l{len(groups)}"
            steps = f"0%{{visibility:hidden}}{100 * start / end:.2f}%{{visibility:visible}}"
            if not is_last:
                steps += f"{100 * since[number + 1][0] / end:.2f}%{{visibility:hidden}}"
            rules.append(f"@keyframes {name}{{{steps}}}")
            state = "last" if is_last else "past"
            groups.append(f'<g class="{state}" style="animation-name:{name}">{drawn(line, row)}</g>')
    width, height = 2 * MARGIN + COLUMNS * CELL_WIDTH, 2 * MARGIN + ROWS * LINE_HEIGHT

    def variables(palette: dict[str, str]) -> str:
        return ";".join(f"--{name}:{value}" for name, value in palette.items())

    style = [
        f"svg{{{variables(LIGHT)}}}",
        f"@media (prefers-color-scheme:dark){{svg{{{variables(DARK)}}}}}",
        "rect{fill:var(--back);stroke:var(--edge)}",
        "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre}",
        *(f".{name}{{fill:var(--{name})}}" for name in ("text", *COLOURS.values())),
        ".bold{font-weight:bold}",
        f"g{{animation:{end:.2f}s step-end infinite}}",
        ".past{visibility:hidden}",
        "@media (prefers-reduced-motion:reduce){g{animation:none}}",
        *rules,
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
            f'height="{height}" role="img" aria-labelledby="title description">',
            f'<title id="title">{escape(TITLE)}</title>',
            f'<desc id="description">{escape(DESCRIPTION)}</desc>',
            f"<metadata>{escape(f'scripts/record.py, {len(recording.shown)} screens')}</metadata>",
            f"<style>{' '.join(style)}</style>",
            f'<rect x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1}" rx="8"/>',
            *groups,
            "</svg>\n",
        ]
    )


def record() -> Recording:
    """Runs the commands in a copy of the example."""
    recording = Recording()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "race"
        shutil.copytree(EXAMPLE, directory)
        for number, command in enumerate(COMMANDS):
            if number:
                recording.seconds += READING_SECONDS
            recording.type(command)
            recording.run(command, directory)
        recording.write("$ ")
        recording.keep()
    return recording


def main() -> None:
    """Writes the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=PICTURE, help=f"default: {PICTURE.relative_to(ROOT)}")
    arguments = parser.parse_args()
    arguments.output.write_text(picture(record()), encoding="utf-8")


if __name__ == "__main__":
    main()
