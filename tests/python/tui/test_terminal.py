"""`chat` and `watch` on a real terminal (tmux): 80 by 24, without colour, resized, closed."""

from __future__ import annotations

import os
import re
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import Mounted
from support.command import Running, branching, branching_argv
from support.screen import SECONDS_MAX, Tmux

from branching import Workspace

WATCHED = """\
 branching watch · 2 open · 0 running · first-winner · BASE
1 ○ open             +1       outer
2 ○ open             +1         inner
────────────────────────────────────────────────────────────────────────────────
outer
made by a program that keeps no log
/main/outer
────────────────────────────────────────────────────────────────────────────────
no output was saved














? keys  q quit  d diff  f files  c commit  a abort
"""


@pytest.fixture
def root(real: Mounted) -> Iterator[Path]:
    yield real.root
    with Workspace(real.root) as space:
        for record in space.branches():
            if record.parent == 0:
                space.reopen(record.name).abort()


def watching(root: Path, **environment: str) -> Tmux:
    return Tmux(root, branching_argv("watch"), **environment)


def nest(root: Path) -> None:
    with Workspace(root) as space, space.branch("outer", on_success=None) as outer:
        (outer.path / "x").write_text("1")
        with outer.branch("inner", on_success=None) as inner:
            (inner.path / "y").write_text("1")


def test_the_screen_is_the_documented_one(real: Mounted, root: Path) -> None:
    nest(root)
    with watching(root) as terminal:
        terminal.until_shown("1 ○ open             +1       outer", "  inner", "no output")
        deadline = time.monotonic() + SECONDS_MAX
        while (found := _below_the_top(terminal.screen())) != _below_the_top(WATCHED):
            assert time.monotonic() < deadline, f"{found}\nis not\n{WATCHED}"
            time.sleep(0.1)
        top = " branching watch · 2 open · 0 running · first-winner · /"
        assert terminal.screen().startswith(top)
        terminal.press("q")
        assert terminal.until_ended() == 0


def _below_the_top(screen: str) -> str:
    return "\n".join(line.rstrip() for line in screen.splitlines()[1:]).strip("\n")


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "vt220"}], ids=str)
def test_without_colour_nothing_is_coloured_and_the_choice_is_seen(
    root: Path, environment: dict[str, str]
) -> None:
    """NO_COLOR is set, or the terminal has no colours."""
    nest(root)
    with watching(root, **environment) as terminal:
        terminal.until_shown("2 ○ open", "  inner")
        found = terminal.screen(with_colours=True)
        codes = {
            code for codes in re.findall(r"\x1b\[([0-9;]*)m", found) for code in codes.split(";")
        }
        assert not codes & {str(n) for n in (*range(30, 39), *range(40, 49), *range(90, 108))}
        assert "7" in codes, "what is chosen is reversed"
        terminal.press("q")
        assert terminal.until_ended() == 0


def test_it_is_drawn_again_when_resized(root: Path) -> None:
    nest(root)
    with watching(root) as terminal:
        terminal.until_shown("2 ○ open", "  inner", "q quit")
        terminal.resize(50, 12)
        terminal.until_shown("2 ○ open", "  inner", "q quit", without="/main/outer")
        assert len(terminal.screen().splitlines()) == 12
        terminal.resize(40, 10)
        terminal.until_shown("2 ○ open", "  inner", "q quit")
        assert len(terminal.screen().splitlines()) == 10
        terminal.resize(120, 40)
        terminal.until_shown("2 ○ open", "  inner", "q quit")
        terminal.press("q")
        assert terminal.until_ended() == 0


def test_a_race_is_steered_from_the_terminal(real: Mounted, root: Path) -> None:
    waits = 'echo waits; until grep -q go "$BRANCHING_STEER"; do sleep 0.02; done; touch made'
    call = Running(root, ["speculate", "--quiet", "-c", waits])
    with watching(root) as terminal:
        terminal.until_shown("● running", "waits")
        terminal.press("s")
        terminal.until_shown("message to speculate")
        terminal.type("go on")
        terminal.press("Enter")
        terminal.until_shown("★ won", "sent to speculate")
        terminal.press("q")
        assert terminal.until_ended() == 0
    assert call.done().code == 0
    assert (real.base / "made").exists()


def test_a_closed_terminal_ends_it_and_touches_nothing(root: Path) -> None:
    nest(root)
    with watching(root) as terminal:
        terminal.until_shown("2 ○ open", "  inner")
        pid = terminal.pid()
        terminal.press("d")
        terminal.hang_up()
        _until_gone(pid)
    with Workspace(root) as space:
        assert {record.name for record in space.branches()} == {"outer", "inner"}


def test_watch_without_a_terminal_is_a_usage_error(root: Path) -> None:
    done = branching(root, "watch")
    assert (done.code, "needs a terminal" in done.err) == (2, True)


def chatting(root: Path, settings: Path, **environment: str) -> Tmux:
    return Tmux(
        root,
        branching_argv("chat", "--agent", "terminal_agent:agent"),
        PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        XDG_CONFIG_HOME=str(settings),
        **environment,
    )


def test_a_whole_chat_with_a_real_agent(real: Mounted, root: Path, place: Path) -> None:
    """Talk, fork in two, go on with one of them, compare, merge, talk on: files and conversation
    are the winner's."""
    ready = place / "ready"
    with chatting(root, place / "settings") as terminal:
        terminal.until_shown("branching chat · function", "type a message")
        _enter(terminal, "hello")
        terminal.until_shown("> hello", "prompt 1 was: hello")
        _enter(terminal, "/fork-strategy manual")
        terminal.until_shown("the winner is chosen: manual")
        _enter(terminal, "/fork")
        terminal.until_shown("Fork: label", "all together")
        for field in ("one", "run echo 1 >>seed.txt; echo made by one", "", "", "two"):
            terminal.type(field)
            terminal.press("Tab")
        terminal.type(f"think {ready}")
        terminal.press("Enter")
        terminal.until_shown("Forked: one, two", "✓ one", "● two", "FORK: 2 · 1 …")
        terminal.press("Tab")
        terminal.until_shown("⚙ shell", "it said: made by one", "one is done")
        _enter(terminal, "run cat seed.txt")
        terminal.until_shown("> run cat seed.txt", "it said: seed")
        ready.touch()
        terminal.until_shown("✓ one", "✓ two", "FORK: 2")
        _enter(terminal, "/fork diff")
        terminal.until_shown("M seed.txt · one (unique)", "+    2 1")
        terminal.press("Escape")
        terminal.until_shown("FORK: 2")  # Escape and a slash at once would be another key
        _enter(terminal, "/merge")
        terminal.until_shown(
            "which branch wins?", "[1-9, enter] merge", "1 ✓ one: done", "2 ✓ two: done"
        )
        terminal.press("1")
        terminal.until_shown("Merged: kept branch one", "1 file applied: seed.txt")
        assert (real.base / "seed.txt").read_text() == "seed\n1\n"
        _enter(terminal, "and now?")
        terminal.until_shown("prompt 4 was: and now?")
        _enter(terminal, "!cat seed.txt; id -u")
        terminal.until_shown("> !cat seed.txt")
        _enter(terminal, "/quit")
        assert terminal.until_ended() == 0


@pytest.mark.parametrize("how", ["killed", "hung up", "left"])
def test_the_fork_of_a_chat_that_ended_is_open_in_the_next(
    real: Mounted, root: Path, place: Path, how: str
) -> None:
    """One branch is done, the other at work; the next chat has both, and merges the first. What the
    other one had started ends with the first chat."""
    nap = f"sleep 9{os.getpid()}"
    with chatting(root, place / "settings", NO_COLOR="1") as terminal:
        terminal.until_shown("type a message")
        _enter(terminal, "hello")
        terminal.until_shown("prompt 1 was: hello")
        _enter(terminal, "/fork-strategy manual")
        terminal.until_shown("the winner is chosen: manual")
        _enter(terminal, "/fork")
        terminal.until_shown("Fork: label")
        for field in ("one", "run echo 1 >>seed.txt", "", "", "two"):
            terminal.type(field)
            terminal.press("Tab")
        terminal.type(f"run {nap}")
        terminal.press("Enter")
        terminal.until_shown("✓ one", "● two")
        found = terminal.screen(with_colours=True)
        assert not re.search(r"\x1b\[[0-9;]*(3[0-8]|4[0-8])m", found)
        pid = terminal.pid()
        if how == "killed":
            os.kill(pid, signal.SIGKILL)
        elif how == "hung up":
            terminal.hang_up()
        else:
            _enter(terminal, "/quit")
            terminal.until_shown("[k] keep them for the next chat")
            terminal.press("k")
        _until_gone(pid)
    with chatting(root, place / "settings") as terminal:
        terminal.until_shown("fork of an earlier chat is open still: one, two", "✓ one", "⊘ two")
        _enter(terminal, "hello")
        terminal.until_shown("! a fork is open")
        _enter(terminal, "/merge")
        terminal.until_shown(
            "which branch wins?", "[1-9, enter] merge", "1 ✓ one: done", "2 ⊘ two: terminated"
        )
        terminal.press("1")
        terminal.until_shown("Merged: kept branch one")
        assert (real.base / "seed.txt").read_text() == "seed\n1\n"
        _enter(terminal, "and now?")
        terminal.until_shown("prompt 3 was: and now?")
        _enter(terminal, "/quit")
        assert terminal.until_ended() == 0
    with Workspace(real.root) as space:
        assert space.branches() == []
    assert nap not in _running()


def test_a_second_chat_says_that_its_fork_is_not_kept(root: Path, place: Path) -> None:
    with chatting(root, place / "settings") as first:
        first.until_shown("type a message")
        with chatting(root, place / "settings") as second:
            second.until_shown("cannot be resumed", "holds the lock")
            _enter(second, "/quit")
            assert second.until_ended() == 0
        _enter(first, "/quit")
        assert first.until_ended() == 0


def test_chat_without_a_terminal_or_a_model_is_a_usage_error(root: Path) -> None:
    done = branching(root, "chat")
    assert (done.code, "needs a terminal" in done.err) == (2, True)
    # tmux may lose the last output of a program that has ended: the shell waits for a key.
    command = f"{shlex.join(branching_argv('chat'))}; code=$?; read -r _; exit $code"
    with Tmux(root, ["sh", "-c", command]) as terminal:
        terminal.until_shown("name a model")
        terminal.press("Enter")
        assert terminal.until_ended() == 2


def _enter(terminal: Tmux, line: str) -> None:
    terminal.type(line)
    terminal.press("Enter")


def _until_gone(pid: int) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while _state(pid) not in ("", "Z"):  # tmux may be late to reap it
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.05)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""


def _running() -> list[str]:
    """Returns the command lines of all processes."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(file.read_text(errors="replace").rstrip("\0").replace("\0", " "))
    return found
