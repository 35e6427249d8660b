"""docs/commands.md is what --help says, and says what there is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from branching.cli.app import app

REPOSITORY = Path(__file__).parents[2]


def test_the_manual_is_what_help_says() -> None:
    done = subprocess.run(
        [sys.executable, REPOSITORY / "scripts" / "manual.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def commands() -> list[str]:
    return [command.name for command in app.registered_commands if command.name]


@pytest.mark.parametrize("name", commands())
def test_every_command_has_help_with_an_example(name: str) -> None:
    text = (REPOSITORY / "docs" / "commands.md").read_text()
    section = text.split(f"### {name}\n", 1)[1].split("\n### ", 1)[0]
    assert "Example: branching" in section
    assert f"branching {name}" in section.split("Example: ", 1)[1].splitlines()[0]


@pytest.mark.parametrize("name", sorted(set(commands()) - {"doctor"}))
def test_every_command_takes_a_workspace(name: str) -> None:
    """6.2"""
    text = (REPOSITORY / "docs" / "commands.md").read_text()
    assert "-w, --workspace PATH" in text.split(f"### {name}\n", 1)[1].split("\n### ", 1)[0]


@pytest.mark.parametrize(
    "name", sorted(set(commands()) - {"shell", "export", "mcp", "watch", "chat"})
)
def test_every_command_that_has_no_other_output_has_a_document(name: str) -> None:
    """6.3"""
    text = (REPOSITORY / "docs" / "commands.md").read_text()
    assert "--json" in text.split(f"### {name}\n", 1)[1].split("\n### ", 1)[0]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_there_for_the_common_shells(
    shell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "branching", "--show-completion", shell],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "BRANCHING_COMPLETE" in done.stdout.upper()
