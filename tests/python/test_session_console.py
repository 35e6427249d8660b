"""`branching session`: a prompt on a real terminal."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import Mounted
from support.command import OnTerminal, branching
from support.waiting import until

from branching import Workspace


class Prompt:
    """A session on a terminal."""

    def __init__(self, real: Mounted, place: Path, *words: str) -> None:
        self.screen = OnTerminal(
            real.root, ["session", *words], XDG_STATE_HOME=str(place), NO_COLOR="1"
        )
        self.screen.wait_for(">>> ")

    def enter(self, line: str, *, prompt: str = ">>> ") -> str:
        """Enters a line and returns what is printed until the next prompt."""
        before = len(self.screen.seen)
        self.screen.type(f"{line}\r")
        until(lambda: self._has(before, prompt), f"a prompt after {line}")
        shown = self.screen.seen[before:].replace("\x1b[?2004l", "").replace("\x1b[?2004h", "")
        return shown.partition("\n")[2].rpartition("\n")[0].strip("\r")

    def _has(self, before: int, prompt: str) -> bool:
        self.screen._read(0.05)
        shown = self.screen.seen[before:].replace("\x1b[?2004h", "")
        return "\n" in shown and shown.endswith(prompt)


@pytest.fixture
def prompt(real: Mounted, place: Path) -> Iterator[Prompt]:
    made = Prompt(real, place)
    yield made
    with suppress(ProcessLookupError, ChildProcessError):  # a failed test did not end it
        os.kill(made.screen.pid, signal.SIGTERM)
        os.waitpid(made.screen.pid, 0)


def branches(real: Mounted) -> list[str]:
    with Workspace(real.root) as space:
        return [record.name for record in space.branches()]


def test_a_session_forks_picks_and_commits(prompt: Prompt, real: Mounted) -> None:
    assert prompt.enter("x = 1; log = open('log.txt', 'a'); _ = log.write('one\\n')") == ""
    assert prompt.enter("x + 1") == "2"
    assert prompt.enter("%fork 3", prompt="0>>> ") == "3 children; code runs in child 0 now"
    prompt.enter("x = 10", prompt="0>>> ")
    prompt.enter("%child 1", prompt="1>>> ")
    prompt.enter("x += 1; print('two', file=log, flush=True)", prompt="1>>> ")
    assert prompt.enter("x, open('log.txt').read()", prompt="1>>> ") == "(2, 'one\\ntwo\\n')"
    assert prompt.enter("%diff", prompt="1>>> ") == "M log.txt"
    listed = prompt.enter("%children", prompt="1>>> ").splitlines()
    assert [line.split()[0] for line in listed] == ["0", "*", "2"]
    shown = prompt.enter("%all print(x)", prompt="1>>> ")
    assert shown.splitlines() == ["child 0:", "10", "child 1:", "2", "child 2:", "1"]
    assert prompt.enter("%pick").splitlines() == ["child 1 is the session now", "M log.txt"]
    assert prompt.enter("x") == "2"
    assert not (real.base / "log.txt").exists()
    assert prompt.enter("%commit") == "A log.txt"
    assert (real.base / "log.txt").read_text() == "one\ntwo\n"
    prompt.screen.type("\x04")
    assert prompt.screen.done().code == 0
    assert branches(real) == []


def test_back_drops_the_children(prompt: Prompt, real: Mounted) -> None:
    prompt.enter("x = 1")
    prompt.enter("%fork 2", prompt="0>>> ")
    prompt.enter("x = 2; open('made', 'w').close()", prompt="0>>> ")
    assert prompt.enter("%pick 5", prompt="0>>> ") == "there are children 0 to 1"
    prompt.enter("%back")
    assert prompt.enter("x") == "1"
    assert prompt.enter("%back").startswith("error: there are no children")
    prompt.screen.type("exit()\r")
    assert prompt.screen.done().code == 0
    assert branches(real) == []


def test_blocks_errors_and_unknown_commands(prompt: Prompt) -> None:
    prompt.enter("def double(n):", prompt="... ")
    prompt.enter("    return n * 2", prompt="... ")
    prompt.enter("")
    assert prompt.enter("double(4)") == "8"
    assert "ZeroDivisionError: division by zero" in prompt.enter("1 / 0")
    assert "SyntaxError" in prompt.enter("1 +* 2")
    assert prompt.enter("%nothing") == "there is no command %nothing; %help lists them"
    assert prompt.enter("%fork") == "a number is missing: %fork 3"
    assert "%pick [K]" in prompt.enter("%help")
    prompt.enter("import subprocess; p = subprocess.Popen(['sleep', '300'])")
    refused = prompt.enter("%fork 2")
    assert "a running child process: sleep 300" in refused
    assert "Hint: end or close it" in refused
    prompt.screen.type("%abort\r")
    assert prompt.screen.done().code == 0


def test_a_key_interrupts_the_code_and_the_session_continues(prompt: Prompt) -> None:
    prompt.enter("x = 5")
    prompt.screen.type("import time; print('sleeps'); time.sleep(600)\r")
    prompt.screen.wait_for("\nsleeps")
    prompt.screen.type("\x03")
    prompt.screen.wait_for("KeyboardInterrupt\n>>> ")
    assert prompt.enter("x") == "5"
    before = len(prompt.screen.seen)
    prompt.screen.type("half a line\x03")
    until(lambda: prompt._has(before, ">>> "), "a new line")
    assert prompt.enter("x + 1") == "6"
    prompt.screen.type("\x04")
    assert prompt.screen.done().code == 0


def test_tab_completes_variables_of_the_session_and_commands(prompt: Prompt) -> None:
    prompt.enter("measurements = [3, 1, 2]")
    assert prompt.enter("measu\t.sor\t); measu\t") == "[1, 2, 3]"
    assert prompt.enter("%for\t 2", prompt="0>>> ") == "2 children; code runs in child 0 now"
    prompt.enter("only_here = 4", prompt="0>>> ")
    assert prompt.enter("only_h\t", prompt="0>>> ") == "4"
    prompt.screen.type("%abort\r")
    assert prompt.screen.done().code == 0


def test_lines_of_an_earlier_session_are_in_the_history(real: Mounted, place: Path) -> None:
    first = Prompt(real, place)
    first.enter("print('remembered', 6 * 7)")
    first.screen.type("\x04")
    assert first.screen.done().code == 0
    second = Prompt(real, place)
    assert second.enter("\x1b[A") == "remembered 42"
    second.screen.type("\x04")
    assert second.screen.done().code == 0


def test_leaving_keeps_uncommitted_files_in_a_branch(prompt: Prompt, real: Mounted) -> None:
    prompt.enter("f = open('made', 'w'); _ = f.write('buffered')")
    prompt.enter("%fork 2", prompt="0>>> ")
    prompt.enter("open('theirs', 'w').close()", prompt="0>>> ")
    prompt.screen.type("\x04")
    done = prompt.screen.done()
    assert done.code == 0
    (name,) = branches(real)
    assert f"branch: {name}\naction: kept\nHint: branching diff {name};" in done.out
    assert branching(real.root, "diff", name).out == "A made\n"
    assert branching(real.root, "commit", name).code == 0
    assert (real.base / "made").read_text() == "buffered"


def test_abort_drops_the_files(prompt: Prompt, real: Mounted) -> None:
    prompt.enter("open('made', 'w').close()")
    prompt.screen.type("%abort\r")
    assert prompt.screen.done().code == 0
    assert branches(real) == []
    assert not (real.base / "made").exists()


@pytest.mark.parametrize("is_running", [False, True], ids=["at the prompt", "while code runs"])
def test_a_signal_ends_it_and_keeps_the_files(
    prompt: Prompt, real: Mounted, is_running: bool
) -> None:
    prompt.enter("open('made', 'w').close()")
    if is_running:
        prompt.screen.type("import time; print('sleeps'); time.sleep(600)\r")
        prompt.screen.wait_for("\nsleeps")
    os.kill(prompt.screen.pid, signal.SIGTERM)
    assert prompt.screen.done().code == 128 + signal.SIGTERM
    (name,) = branches(real)
    assert branching(real.root, "abort", name).code == 0


def test_without_a_terminal_it_is_refused(real: Mounted) -> None:
    done = branching(real.root, "session")
    assert done.code == 2
    assert "session needs a terminal" in done.err


def test_its_options_reach_the_sandbox(
    real: Mounted, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_KEY", "k")
    monkeypatch.setenv("SHOWN", "s")
    prompt = Prompt(
        real, place, "--clean-env", "--env", "SHOWN", "--no-network", "--pids-limit", "20"
    )
    prompt.enter("import os")
    assert prompt.enter("os.environ.get('SECRET_KEY'), os.environ.get('SHOWN')") == "(None, 's')"
    assert prompt.enter("len(open('/proc/net/dev').readlines()) - 2") == "1"
    prompt.screen.type("\x04")
    assert prompt.screen.done().code == 0
