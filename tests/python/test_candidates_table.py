"""The table of candidates on a terminal: content, size, and escaping of control characters."""

from __future__ import annotations

import io
import re
import shlex
import time
from typing import Any

import pytest
from conftest import Mounted
from rich.cells import cell_len
from rich.console import Console
from support.command import branching_argv
from support.screen import Tmux

from branching.cli.progress_table import LINE_CHARACTERS_MAX, ProgressTable
from branching.patterns import Event


def event(kind: Any, index: int = 0, **facts: Any) -> Event:
    return Event(kind=kind, index=index, branch=f"b{index}", **facts)


def drawn(board: ProgressTable, columns: int = 80, lines: int = 24, **options: Any) -> list[str]:
    """Returns the lines of the screen that it takes."""
    console = Console(
        file=io.StringIO(), width=columns, height=lines, force_terminal=True, **options
    )
    with console.capture() as captured:
        console.print(board.table(console))
    return [line.rstrip() for line in captured.get().splitlines()]


def plain(board: ProgressTable, columns: int = 80, lines: int = 24) -> list[str]:
    return drawn(board, columns, lines, color_system=None)


def test_each_candidate_has_a_row_from_the_beginning() -> None:
    board = ProgressTable(["make a", "make b"])
    board.on_event(event("started", 1))
    board.on_event(event("output", 1, text="hello"))
    head, first, second = plain(board)
    assert head.split() == ["#", "candidate", "state", "time", "changes", "last", "output"]
    assert first.split()[:4] == ["0", "make", "a", "waiting"]
    assert second.split()[:4] == ["1", "make", "b", "running"]
    assert second.endswith("hello")


def test_more_rows_than_lines_show_those_that_say_most() -> None:
    board = ProgressTable([f"number {index}" for index in range(12)])
    for index in range(8):
        board.on_event(event("started", index))
    for index in (0, 1, 2, 5):
        board.on_event(event("finished", index, state="failed"))
    _, *rows, rest = plain(board, lines=10)
    assert len(rows) + 4 == 10  # with the head, and the two last lines of a live table
    assert [row.split()[0] for row in rows] == ["2", "3", "4", "5", "6", "7"]
    assert rest.strip() == "and 2 failed, 4 waiting"
    board.is_over = True
    assert len(plain(board, lines=10)) == 13


def test_the_last_line_moves_and_has_the_time_and_the_states() -> None:
    board = ProgressTable(["make a", "make b"])
    board.on_event(event("started", 1))

    def last(encoding: str) -> str:
        file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        console = Console(file=file, width=80, height=24, force_terminal=True, color_system=None)
        with console.capture() as captured:
            console.print(board.drawing(console))
        return captured.get().splitlines()[-2].rstrip()

    shape = r"(.) \d+\.\d+s · 1 waiting, 1 running"
    found = re.fullmatch(shape, last("utf-8"))
    assert found, last("utf-8")
    assert found[1] in "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
    deadline = time.monotonic() + 10
    while re.fullmatch(shape, last("utf-8"))[1] == found[1]:  # type: ignore[index]
        assert time.monotonic() < deadline
    assert last("ascii")[0] in "|/-\\"
    board.is_over = True
    assert "waiting" in last("utf-8")  # it is a row's: there is no such line any more
    assert " · " not in last("utf-8")


def test_candidates_are_shown_by_what_differs() -> None:
    """Method: long commands that are equal up to a place that a terminal has no columns for."""
    labels = [
        "sed -i 's/return size(text)/return size(text) - 1/' a.py && make test",
        "sed -i 's/return size(text)/return size(text) + 1/' a.py && make test",
        "make test",
        "make test",
        "make again",
    ]
    _, *rows = plain(ProgressTable(labels), 200)
    assert [row.rpartition("waiting")[0].strip()[3:] for row in rows] == [
        "sed …- 1/' a.py && make test",
        "sed …+ 1/' a.py && make test",
        "make test",
        "make test",
        "make again",
    ]


def test_columns_do_not_move_when_a_candidate_ends() -> None:
    board = ProgressTable(["make a", "make b"])
    board.on_event(event("started", 0))
    before = plain(board)[0]
    board.on_event(event("finished", 0, state="succeeded"))
    assert plain(board)[0] == before


@pytest.mark.parametrize("columns", [20, 40, 59, 60, 80, 200])
def test_it_is_never_wider_than_the_terminal(columns: int) -> None:
    board = ProgressTable(["x" * 300, "\u6f22\u5b57" * 100])
    for index in range(2):
        board.on_event(event("started", index))
        board.on_event(event("output", index, text="\u6f22\u5b57 \U0001f600" * 100))
        board.on_event(event("finished", index, state="timed_out", seconds=12345.6))
        board.on_event(event("scored", index, score=-0.123))
    lines = plain(board, columns)
    assert len(lines) == 3
    assert max(cell_len(line) for line in lines) <= columns


def test_on_a_narrow_one_the_last_line_is_still_there() -> None:
    board = ProgressTable(["make"])
    board.on_event(event("started"))
    board.on_event(event("output", text="all well"))
    assert "all well" in plain(board, 40)[1]
    assert "changes" not in plain(board, 40)[0]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1bc\x1b[2J\x1b]0;title\x07\x9b2J", "^[c^[[2J^[]0;title^G\\x9b2J"),
        ("first\nlast\n", "last"),
        (" 10%\r 50%\r 90%", "90%"),
        ("\u202eabc", "\\u202eabc"),
        ("y" * 10_000, "y" * 30),
    ],
    ids=["commands", "lines", "progress bar", "direction", "long"],
)
def test_output_of_a_candidate_does_not_control_the_terminal(text: str, shown: str) -> None:
    board = ProgressTable(["x"])
    board.on_event(event("output", text=text))
    [_, row] = plain(board, 120)
    assert row.partition(" waiting ")[2].strip().startswith(shown)
    assert not any(character < " " for character in row)
    board = ProgressTable([text])
    board.on_event(event("finished", state="error", text=text))
    assert not any(character < " " for line in plain(board, 120) for character in line)


def test_the_kept_part_of_a_line_is_bounded() -> None:
    board = ProgressTable(["z" * 10_000])
    board.on_event(event("output", text="z" * 10_000))
    assert "".join(plain(board, 5000)).count("z") == 2 * LINE_CHARACTERS_MAX


def test_colours_stay_in_their_own_cell() -> None:
    board = ProgressTable(["x"])
    board.on_event(event("started"))
    board.on_event(event("output", text="\x1b[31mred"))
    [_, row] = drawn(board, color_system="standard")
    assert row.rstrip().endswith("\x1b[0m")


class TestOnARealTerminal:
    """The table in a real terminal (tmux)."""

    def test_it_follows_the_size_of_the_terminal(self, real: Mounted) -> None:
        words = [word for n in range(12) for word in ("-c", f"echo this is {n}; sleep 600")]
        with Tmux(real.root, branching_argv("speculate", *words), COLUMNS="") as tmux:
            tmux.resize(80, 10)
            tmux.until_shown("this is 11", "and 6 running")
            tmux.resize(100, 20)
            screen = tmux.until_shown(*(f"this is {n}" for n in range(12)))
            assert "and " not in screen
            tmux.press("C-c")
            assert tmux.until_ended() == 130
            assert "nothing was committed" in tmux.screen()

    def test_ctrl_c_leaves_the_table_whole(self, real: Mounted) -> None:
        """The terminal writes ^C where the cursor is."""
        candidates = ["-c", "echo one; sleep 600", "-c", "echo two; sleep 600"]
        command = shlex.join(branching_argv("speculate", *candidates))
        script = f"echo before; echo before; exec {command}"
        with Tmux(real.root, ["sh", "-c", script]) as tmux:
            tmux.until_shown("one", "two", "running")
            tmux.press("C-c")
            assert tmux.until_ended() == 130
            assert tmux.screen().count("last output") == 1, tmux.screen()
            assert "^C" not in tmux.screen()


def test_the_node_of_each_candidate_is_shown_if_attempts_run_on_a_cluster() -> None:
    board = ProgressTable(["make a", "make b"])
    for index in range(2):
        board.on_event(event("started", index))
    assert "node" not in plain(board)[0].split()
    board.on_event(event("placed", 1, node="worker-7/a\x1b[31m1"))
    head, first, second = plain(board, 120)
    assert head.split() == ["#", "candidate", "state", "time", "node", "changes", "last", "output"]
    assert "worker-7" not in first
    assert "worker-7" in second
    assert "\x1b" not in second
    assert "node" not in plain(board, 40)[0].split(), "a narrow terminal has no room for it"
