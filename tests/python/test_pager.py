"""Long output on a terminal: colours, the pager, tables with headers and relative times."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

import pytest
from conftest import Mounted
from support.command import OnTerminal, branching

from branching.cli.table import time_ago

GREEN, RED, BOLD = "\x1b[32m", "\x1b[31m", "\x1b[1m"


@pytest.fixture
def root(real: Mounted) -> Path:
    root = real.root
    (root / "file").write_text("old\n-- dashes\n")
    words = ["run", "-b", "kept", "--on-success", "keep", "--"]
    script = "printf 'new\\n' >file; touch added"
    assert branching(root, *words, "sh", "-c", script).code == 0
    return root


@pytest.fixture
def pager(tmp_path: Path) -> str:
    """A pager that marks what it shows."""
    program = tmp_path / "pager"
    program.write_text("#!/bin/sh\necho 'in the pager'\ncat\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(
    "words",
    [
        ["diff", "kept"],
        ["diff", "-p", "kept"],
        ["diff", "--stat", "kept"],
        ["log"],
        ["log", "-p", "kept"],
        ["log", "kept"],
    ],
    ids=" ".join,
)
def test_a_terminal_gets_a_pager_unless_it_is_turned_off(
    root: Path, pager: str, words: list[str]
) -> None:
    assert "in the pager" in OnTerminal(root, words, PAGER=pager).done().out
    assert "in the pager" not in OnTerminal(root, [*words, "--no-pager"], PAGER=pager).done().out
    assert "in the pager" not in OnTerminal(root, words, PAGER=pager, TERM="dumb").done().out
    assert "in the pager" not in branching(root, *words, PAGER=pager).out


def test_a_pager_that_ends_early_is_no_failure(root: Path, tmp_path: Path) -> None:
    program = tmp_path / "quits"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    assert OnTerminal(root, ["diff", "-p", "kept"], PAGER=str(program)).done().code == 0


def test_a_pager_that_is_missing_is_replaced(root: Path) -> None:
    done = OnTerminal(root, ["diff", "kept"], PAGER="no-such-pager").done()
    assert (done.code, "added" in done.out) == (0, True)


def test_a_patch_is_coloured_on_a_terminal_alone(root: Path) -> None:
    shown = OnTerminal(root, ["diff", "-p", "kept"], PAGER="cat").done().out
    assert f"{GREEN}+new" in shown
    assert f"{RED}-old" in shown
    assert f"{RED}--- dashes" in shown, "a removed line that looks like a header"
    assert f"{BOLD}--- a/file" in shown
    for done in (
        OnTerminal(root, ["diff", "-p", "kept"], PAGER="cat", NO_COLOR="1").done(),
        branching(root, "diff", "-p", "kept"),
    ):
        assert "\x1b" not in done.out
        assert "\n+new\n" in done.out


def test_the_list_of_changes_has_coloured_letters(root: Path) -> None:
    assert f"{GREEN}A\x1b[0m added" in OnTerminal(root, ["diff", "kept"], PAGER="cat").done().out
    assert branching(root, "diff", "kept").out == "A added\nM file\n"


def test_tables_have_headers_and_relative_times(root: Path) -> None:
    def shown(command: str) -> list[str]:
        return OnTerminal(root, [command], NO_COLOR="1", PAGER="cat").done().out.splitlines()

    assert OnTerminal(root, ["ls"]).done().out.startswith(f"{BOLD}NAME")
    headers, line = shown("ls")
    assert headers.split() == ["NAME", "STATE", "CREATED", "PLACE"]
    assert (line.split()[0], "ago" in line or "just now" in line) == ("kept", True)
    headers, line = shown("log")
    assert headers.split() == ["BRANCH", "STATE", "TIME", "STARTED", "COMMAND"]  # no score
    assert branching(root, "commit", "kept").code == 0
    headers, line = shown("history")
    assert headers.split() == ["ID", "COMMITTED", "STATE", "PATHS", "SIZE", "BRANCH"]
    assert shown("ls") == ["no branch is open"]


def test_a_table_is_as_wide_as_the_terminal_and_its_states_are_coloured(root: Path) -> None:
    long = f"echo {'x' * 200}; exit 3"
    assert branching(root, "best-of-n", "-n", "1", "--", "sh", "-c", long).code == 1
    shown = OnTerminal(root, ["log"], PAGER="cat", COLUMNS="70").done().out.splitlines()
    [line] = [line for line in shown if "xxx" in line]
    assert f"{RED}failed\x1b[0m" in line
    plain = re.sub(r"\x1b\[[0-9;]*m", "", line)
    assert (len(plain), plain[-1]) == (70, "…")
    assert long in branching(root, "log").out


def test_a_pipe_gets_rows_alone_with_times_without_spaces(root: Path) -> None:
    [record] = branching(root, "ls", "--json").document["branches"]
    [line] = branching(root, "ls").out.splitlines()
    name, _, created, _ = line.split()
    assert name == "kept"
    assert abs(datetime.fromisoformat(created).timestamp() - record["created"]) <= 1
    assert len(branching(root, "log").out.splitlines()) == 1
    assert branching(root, "abort", "kept").code == 0
    done = branching(root, "ls")
    assert (done.out, done.err) == ("", "")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "just now"),
        (1, "1 second ago"),
        (59, "59 seconds ago"),
        (60, "1 minute ago"),
        (1394, "23 minutes ago"),
        (7200, "2 hours ago"),
        (86400 * 3, "3 days ago"),
        (86400 * 30, "1969-12-02"),
        (-5, "just now"),
    ],
)
def test_times_are_in_the_largest_unit(
    seconds: float, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    assert time_ago(-seconds, now=0.0) == text


def test_the_changes_of_a_question_are_cut_with_a_count(root: Path) -> None:
    words = ["run", "--ask", "--", "sh", "-c", "for i in $(seq 10 34); do touch $i; done"]
    run = OnTerminal(root, words)
    run.wait_for("[y/n] ")
    run.type("n\n")
    done = run.done()
    assert "... and 5 more" in done.out
    assert "A 30" not in done.out
