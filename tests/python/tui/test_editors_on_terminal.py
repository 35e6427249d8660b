"""Real editors on a real terminal (tmux)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Mounted
from support.command import branching_argv
from support.screen import Tmux

from branching import Workspace

EDITORS = {
    # What it is called with, what is struck to change the first line and save, and to leave.
    "vi": ("vi {branches}", ["i", *"more ", "Escape", ":", "w", "q", "Enter"], [":", "q", "Enter"]),
    "nano": ("nano {branches}", [*"more ", "C-o", "Enter", "C-x"], ["C-x"]),
}


@pytest.fixture(params=list(EDITORS))
def editor(request: pytest.FixtureRequest) -> tuple[str, list[str], list[str]]:
    return EDITORS[request.param]


@pytest.fixture
def space(real: Mounted) -> Iterator[Workspace]:
    with Workspace(real.root) as space:
        yield space
        for record in space.branches():
            space.reopen(record.name).abort()


def test_diff_tool_opens_an_editor_for_the_terminal_file_by_file(
    space: Workspace, editor: tuple[str, list[str], list[str]]
) -> None:
    """`branching diff --tool`. What is changed in the editor is changed in the branch."""
    tool, edits, leaves = editor
    with space.branch("b", on_success=None) as branch:
        (branch.path / "one").write_text("first file\n")
        (branch.path / "two").write_text("second file\n")
    with Tmux(space.root, branching_argv("diff", "b", "--tool"), BRANCHING_DIFFTOOL=tool) as screen:
        screen.until_shown("first file")
        screen.press(*edits)
        screen.until_shown("second file")
        screen.press(*leaves)
        assert screen.until_ended() == 0
    assert (branch.path / "one").read_text() == "more first file\n"
    assert (branch.path / "two").read_text() == "second file\n"


@pytest.mark.contract("K6")
def test_the_chat_lends_the_terminal_to_the_editor_and_takes_it_back(
    space: Workspace, place: Path, editor: tuple[str, list[str], list[str]]
) -> None:
    """`o` in the picker. Afterwards the chat is redrawn, is where it was, and receives its keys."""
    tool, edits, _ = editor
    chat = Tmux(
        space.root,
        branching_argv("chat", "--agent", "terminal_agent:agent"),
        PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        XDG_CONFIG_HOME=str(place / "settings"),
        BRANCHING_DIFFTOOL=tool.replace("{branches}", "{branches}/seed.txt"),
    )
    with chat as screen:
        screen.until_shown("type a message")
        screen.type("/fork-strategy manual")
        screen.press("Enter")
        screen.until_shown("the winner is chosen: manual")
        screen.type("/fork")
        screen.press("Enter")
        screen.until_shown("Fork: label")
        for field in ("one", "run echo changed >seed.txt"):
            screen.type(field)
            screen.press("Tab")
        screen.press("Enter")
        screen.until_shown("✓ one")
        screen.type("/merge")
        screen.press("Enter")
        screen.until_shown("which branch wins?", "[1-9, enter] merge")
        screen.until_mouse(is_heard=True)
        screen.press("o")
        screen.until_mouse(is_heard=False)  # the terminal is the editor's alone
        screen.until_shown("changed", without="branching chat")
        screen.press(*edits)
        screen.until_shown(
            "which branch wins?",
            "[1-9, enter] merge",
            "branching chat · ",
            "FORK: 1",
            "1 ✓ one: done",
        )
        screen.press("1")
        screen.until_shown("Merged: kept branch one")
        screen.type("/quit")
        screen.press("Enter")
        assert screen.until_ended() == 0
    assert (space.base / "seed.txt").read_text() == "more changed\n"
