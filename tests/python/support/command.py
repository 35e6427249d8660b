"""The `branching` command as a user runs it: in a process of its own, in pipes or on a terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

SECONDS_MAX = 120.0


@dataclass(frozen=True)
class Done:
    """The exit code and the outputs of a command."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document that stdout consists of."""
        return json.loads(self.out)


def branching_argv(*words: str) -> list[str]:
    return [sys.executable, "-m", "branching", *words]


def branching(cwd: Path, *words: str, stdin: str = "", **environment: str) -> Done:
    """Runs `branching WORDS` in `cwd` with pipes all around."""
    done = subprocess.run(
        branching_argv(*words),
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=SECONDS_MAX,
        env={**os.environ, "COLUMNS": "100", **environment},
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


class Running:
    """A command that is still running, in pipes. After SIGABRT it prints where its threads are."""

    started: ClassVar[list[subprocess.Popen[str]]] = []

    def __init__(self, cwd: Path, words: Sequence[str], argv: Sequence[str] | None = None) -> None:
        self.process = subprocess.Popen(
            argv or branching_argv(*words),
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        )
        self.started.append(self.process)

    @classmethod
    def end_all(cls) -> list[object]:
        """Ends those that a test left: their mounts would fail the tests after it, too.
        Returns their words."""
        left = [process for process in cls.started if process.poll() is None]
        cls.started.clear()
        for process in left:
            process.terminate()
            process.communicate(timeout=SECONDS_MAX)
        return [process.args for process in left]

    def assert_running(self) -> None:
        """Fails with the output of a command that has ended too early."""
        if self.process.poll() is not None:
            raise AssertionError(f"it ended too early: {self.done()}")

    def wait_for_line(self, text: str) -> None:
        """Waits until a line on stderr has the text."""
        assert self.process.stderr
        for line in self.process.stderr:
            if text in line:
                return
        raise AssertionError(f"it ended without saying {text!r}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def done(self) -> Done:
        out, err = self.process.communicate(timeout=SECONDS_MAX)
        return Done(self.process.returncode, out, err)


class OnTerminal:
    """A command on a terminal of its own."""

    def __init__(
        self,
        cwd: Path,
        words: Sequence[str],
        program: Sequence[str] | None = None,
        **environment: str,
    ) -> None:
        line = branching_argv(*words) if program is None else [*program, *words]
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            try:
                os.chdir(cwd)
                os.environ.update({"TERM": "xterm", "COLUMNS": "100", **environment})
                os.execvp(line[0], line)
            finally:
                os._exit(99)
        self.seen = ""

    def wait_for(self, text: str) -> None:
        """Reads the screen until the text has appeared."""
        deadline = time.monotonic() + SECONDS_MAX
        while text not in self.seen:
            assert time.monotonic() < deadline, f"no {text!r} in:\n{self.seen}"
            if not self._read(0.1) and self._has_ended():
                raise AssertionError(f"it ended without {text!r}:\n{self.seen}")

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def done(self) -> Done:
        """Waits for the end; both outputs are what was on the screen."""
        deadline = time.monotonic() + SECONDS_MAX
        while not self._has_ended():
            assert time.monotonic() < deadline, f"it does not end:\n{self.seen}"
            self._read(0.05)
        while self._read(0.05):
            pass
        os.close(self.master)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return Done(code, self.seen, self.seen)

    def _has_ended(self) -> bool:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, flags) is not None

    def _read(self, seconds: float) -> bool:
        if not select.select([self.master], [], [], seconds)[0]:
            return False
        try:
            arrived = os.read(self.master, 65536)
        except OSError:  # EIO: the last process has closed the terminal
            return False
        self.seen += arrived.decode(errors="replace").replace("\r\n", "\n")
        return bool(arrived)
