"""Keys and hang-ups at any moment of `branching run`, and readers that go away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Mounted
from support.command import OnTerminal, branching_argv
from support.waiting import until

from branching import Workspace

WAIT_SECONDS_MAX = 60
PAUSED = """
import os, sys, time
from branching.process import command, pty_proxy
from branching.process.sandbox import launcher

go = sys.argv.pop(1)
def paused(function, *, after):
    def call(*arguments):
        value = function(*arguments) if after else None
        os.write(2, b"PAUSED")
        while not os.path.exists(go):
            time.sleep(0.005)
        return value if after else function(*arguments)
    return call
{patch}
from branching.cli import main
main()
"""
MOMENTS = {
    "before the sandbox is asked for": "launcher.start = paused(launcher.start, after=False)",
    "when the command runs": "launcher.start = paused(launcher.start, after=True)",
    "before keys are carried": (
        "own = pty_proxy.PtyProxy; own.begin = paused(own.begin, after=False)"
    ),
    "when keys are carried": (
        "own = pty_proxy.PtyProxy; own.begin = paused(own.begin, after=True)"
    ),
}
LONG = ["tee", "made"]
"""Makes its file and then waits for keys. No shell: dash ignores a Ctrl-C that arrives between its
vfork and the exec of what it starts, on any terminal."""


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_key_struck_while_the_command_starts_ends_it_and_nothing_is_committed(
    real: Mounted, place: Path, moment: str
) -> None:
    go = place / "go"
    code = PAUSED.replace("{patch}", MOMENTS[moment])
    program = [sys.executable, "-c", code, str(go)]
    screen = OnTerminal(real.root, ["run", "--", *LONG], program)
    screen.wait_for("PAUSED")
    screen.type("\x03")
    go.touch()
    assert screen.done().code == 130, screen.seen
    assert not (real.base / "made").exists()
    with Workspace(real.root) as space:
        assert space.branches() == []


@pytest.mark.parametrize("options", [[], ["--no-log"]], ids=["logged", "not logged"])
def test_a_closed_terminal_ends_the_command_with_129(real: Mounted, options: list[str]) -> None:
    screen = OnTerminal(real.root, ["run", *options, "--", "sh", "-c", "echo up; sleep 600"])
    screen.wait_for("up")
    os.close(screen.master)
    until(screen._has_ended, "its end")
    assert os.waitstatus_to_exitcode(os.waitpid(screen.pid, 0)[1]) == 128 + signal.SIGHUP
    with Workspace(real.root) as space:
        assert space.branches() == []


@pytest.mark.parametrize("words", [["run", "--", "yes"], ["run", "-q", "--", "yes"], ["status"]])
def test_a_reader_that_goes_away_ends_a_command_as_sigpipe_does(
    real: Mounted, words: list[str]
) -> None:
    reader, writer = os.pipe()
    if words == ["status"]:
        os.close(reader)
    with subprocess.Popen(
        branching_argv(*words), cwd=real.root, stdout=writer, stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(writer)
        if words != ["status"]:
            assert os.read(reader, 2) == b"y\n"
            os.close(reader)
        _, err = process.communicate(timeout=WAIT_SECONDS_MAX)
    assert process.returncode == 128 + signal.SIGPIPE, err
    assert "Traceback" not in err
    assert "BrokenPipe" not in err
