#!/usr/bin/env python3
"""Writes the second half of the references: the --help of every command, the tools of the server. The first is by hand.

The wrapper's table of `branching`'s commands is written too: it shows their help without an image.

.venv/bin/python scripts/manual.py            writes them
.venv/bin/python scripts/manual.py --check    fails if one is not what would be written
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from typer.main import get_command
from typer.testing import CliRunner

from branching.cli.app import app as branching
from branching_docker.inner import TABLE
from tool_reference import tools

if TYPE_CHECKING:
    from typer import Typer

DOCS = Path(__file__).parents[1] / "docs"
SEAM = "## The commands\n"
GROUP_HEAD = """# Commands: {group}

`scripts/manual.py` writes this page from `--help`. [All commands](commands.md) explains variables,
output and exit codes.
"""
HOST_NAME = "branching-docker -w DIR"
"""How the wrapper's user begins a command line."""


def manuals() -> dict[Path, str]:
    """Returns the whole text of each reference."""
    # They read the table, which is written before.
    from branching_docker.cli import app as wrapper
    from branching_docker.commands import FORWARDED_COMMANDS

    # What the wrapper passes on is in the other reference.
    own = [str(name) for command in wrapper.registered_commands if (name := told(command)) not in FORWARDED_COMMANDS]
    return {
        **command_pages(),
        DOCS / "branching-docker.md": manual(DOCS / "branching-docker.md", wrapper, "branching-docker", ["", *own]),
        DOCS / "mcp-reference.md": tool_manual(DOCS / "mcp-reference.md"),
    }


def tables() -> dict[Path, str]:
    """Returns the whole text of the wrapper's table of commands."""
    names = [told(command) for command in branching.registered_commands]
    # A command in a text, not the package of that name nor a sentence about it.
    named: re.Pattern[str] = re.compile(rf"\bbranching (?={'|'.join(names)}\b)")
    commands = {}
    for name, command in get_command(branching).commands.items():  # type: ignore[attr-defined]
        shown = CliRunner().invoke(branching, [name, "--help"], prog_name=f"{HOST_NAME}", env={"COLUMNS": "80"})
        assert shown.exit_code == 0, shown.output
        lines = [line.rstrip() for line in shown.output.strip().splitlines()]
        commands[name] = {
            "summary": command.short_help,
            "group": command.rich_help_panel,
            "help": named.sub(f"{HOST_NAME} ", "\n".join(lines)),
            "wraps": not command.context_settings.get("allow_interspersed_args", True),
            "options": [
                {"names": names, "takes_value": not each.is_flag, "help": " ".join((each.help or "").split())}
                for each in command.params
                if each.param_type_name == "option"
                for names in (each.opts, each.secondary_opts)
                if names
            ],
        }
    return {TABLE: json.dumps(commands, indent=1) + "\n"}


def tool_manual(path: Path) -> str:
    """Returns the whole text of the reference of the tools."""
    head, seam, _ = path.read_text(encoding="utf-8").partition("## The tools\n")
    return f"{head}{seam}\n{tools()}"


def told(command: object) -> str:
    """Returns a command's name; without one it has its function's."""
    return str(getattr(command, "name", None) or getattr(command, "callback").__name__)  # noqa: B009


def command_pages() -> dict[Path, str]:
    """Returns the whole text of the reference of `branching`: an overview, and a page for each group of its help."""
    groups: dict[str, list[str]] = {}
    for command in branching.registered_commands:
        groups.setdefault(str(command.rich_help_panel), []).append(told(command))
    pages: dict[Path, str] = {}
    rows = ["| group | commands |", "|---|---|"]
    for group, names in groups.items():
        page = DOCS / f"commands-{group.lower().replace(' ', '-')}.md"
        helps = [help_of(branching, "branching", name, level="##") for name in names]
        pages[page] = "\n".join([GROUP_HEAD.format(group=group), *helps])
        links = " · ".join(f"[`{name}`]({page.name}#{name})" for name in names)
        rows.append(f"| [{group}]({page.name}) | {links} |")
    overview = DOCS / "commands.md"
    head, seam, _ = overview.read_text(encoding="utf-8").partition(SEAM)
    table = "\n".join(rows)
    return {overview: f"{head}{seam}\n{table}\n\n{help_of(branching, 'branching', '')}", **pages}


def manual(path: Path, app: Typer, program: str, names: list[str]) -> str:
    """Returns the whole text of one reference, given the one there is; "" is the program itself."""
    head, seam, _ = path.read_text(encoding="utf-8").partition(SEAM)
    return "\n".join([head + seam, *(help_of(app, program, name) for name in names)])


def help_of(app: Typer, program: str, name: str, level: str = "###") -> str:
    """Returns the section with the help of one command."""
    shown = CliRunner().invoke(app, [*name.split(), "--help"], prog_name=program, env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.output
    text = "\n".join(line.rstrip() for line in shown.output.strip().splitlines())
    return f"{level} {name or program}\n\n```text\n{text}\n```\n"


def main() -> int:
    os.environ["COLUMNS"] = "80"
    stale = []
    for written in (tables, manuals):
        for path, text in written().items():
            if path.exists() and path.read_text(encoding="utf-8") == text:
                continue
            stale.append(str(path))
            if "--check" not in sys.argv[1:]:
                path.write_text(text, encoding="utf-8")
    if stale and "--check" in sys.argv[1:]:
        print(f"not what --help says: {' '.join(stale)}. Hint: .venv/bin/python scripts/manual.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
