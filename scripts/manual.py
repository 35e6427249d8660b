#!/usr/bin/env python3
"""Writes the second half of docs/commands.md, the --help of every command. The first is written by hand.

.venv/bin/python scripts/manual.py            writes it
.venv/bin/python scripts/manual.py --check    fails if it is not what would be written
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from typer.testing import CliRunner

from branching.cli.app import app

MANUAL = Path(__file__).parents[1] / "docs" / "commands.md"
SEAM = "## The commands\n"


def manual(written: str) -> str:
    """Returns the whole text, given the one there is."""
    os.environ["COLUMNS"] = "80"
    head, seam, _ = written.partition(SEAM)
    parts = [head + seam]
    for command in app.registered_commands:
        assert command.name
        shown = CliRunner().invoke(app, [command.name, "--help"], prog_name="branching")
        assert shown.exit_code == 0, shown.output
        text = "\n".join(line.rstrip() for line in shown.output.strip().splitlines())
        parts.append(f"### {command.name}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


def main() -> int:
    written = MANUAL.read_text(encoding="utf-8")
    text = manual(written)
    if "--check" not in sys.argv[1:]:
        MANUAL.write_text(text, encoding="utf-8")
    elif written != text:
        print(f"{MANUAL} is not what --help says. Hint: .venv/bin/python scripts/manual.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
