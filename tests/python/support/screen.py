"""Reads the screen of an application under a pilot, or of a real terminal (tmux)."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from textual.app import App
from textual.pilot import Pilot

SECONDS_MAX = 120.0


def shown(app: App[Any]) -> str:
    """Returns the text of the screen in front, line by line."""
    strips = app.screen._compositor.render_strips()
    return "\n".join(strip.text.rstrip() for strip in strips)


async def until(pilot: Pilot[Any], condition: Callable[[], object], what: str) -> None:
    """Waits until the condition holds; fails with what is on the screen."""
    deadline = time.monotonic() + SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline, f"still not so: {what}\n{shown(pilot.app)}"
        await pilot.pause(0.05)


async def until_shown(pilot: Pilot[Any], *texts: str) -> None:
    """Waits until all the texts are on the screen."""

    def are_shown() -> bool:
        screen = shown(pilot.app)
        return all(text in screen for text in texts)

    await until(pilot, are_shown, f"{texts} on the screen")


def piloted(
    app: App[Any],
    act: Callable[[Pilot[Any]], Coroutine[Any, Any, None]],
    size: tuple[int, int] = (80, 24),
) -> None:
    """Runs an application without a terminal in a new event loop, and acts on it."""

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await act(pilot)

    asyncio.run(run())


class Tmux:
    """A terminal of 80 by 24 that a person could sit at, with a program in it."""

    def __init__(self, cwd: Path, argv: Sequence[str], **environment: str) -> None:
        self._name = f"bt-{secrets.token_hex(4)}"
        self._cwd = cwd
        self._argv = argv
        self._environment = environment

    def __enter__(self) -> Tmux:
        pairs = [f"{key}={value}" for key, value in self._environment.items()]
        options = ["-d", "-s", "s", "-x", "80", "-y", "24", "-c", str(self._cwd)]
        self._run(
            "-f", "/dev/null", "start-server",
            ";", "set-option", "-g", "remain-on-exit", "on",
            ";", "set-option", "-g", "status", "off",
            ";", "new-session", *options, "env", *pairs, *self._argv,
        )  # fmt: skip
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        subprocess.run(["tmux", "-L", self._name, "kill-server"], capture_output=True, check=False)

    def screen(self, *, with_colours: bool = False) -> str:
        """Returns what is on the screen."""
        return self._run("capture-pane", "-p", "-t", "s", *(["-e"] if with_colours else []))

    def until_shown(self, *texts: str, without: str | None = None) -> str:
        """Waits until all the texts are on the screen, and one is not; returns it."""
        deadline = time.monotonic() + SECONDS_MAX
        while not all(text in (screen := self.screen()) for text in texts) or (
            without is not None and without in screen
        ):
            assert time.monotonic() < deadline, f"no {texts} without {without} in\n{screen}"
            time.sleep(0.05)
        return screen

    def press(self, *keys: str) -> None:
        """Strikes keys, named as tmux does: `a`, `Enter`, `Escape`, `Tab`."""
        self._run("send-keys", "-t", "s", *keys)

    def type(self, text: str) -> None:
        """Types a text as it stands."""
        self._run("send-keys", "-t", "s", "-l", text)

    def resize(self, columns: int, lines: int) -> None:
        """Gives the terminal another size."""
        self._run("resize-window", "-t", "s", "-x", str(columns), "-y", str(lines))

    def hang_up(self) -> None:
        """Closes the terminal, as a lost connection does."""
        self._run("kill-pane", "-t", "s")

    def until_ended(self) -> int:
        """Waits until the program has ended; returns its exit code."""
        deadline = time.monotonic() + SECONDS_MAX
        wanted = "#{pane_dead} #{pane_dead_status}"
        while True:
            dead, _, status = self._run("display-message", "-p", "-t", "s", wanted).partition(" ")
            if dead == "1" and status.strip():
                return int(status)
            if dead == "1":
                # tmux 3.3 misses the end of some programs until another one of its own ends.
                self._run("run-shell", "true")
            assert time.monotonic() < deadline, f"it does not end\n{self.screen()}"
            time.sleep(0.05)

    def until_mouse(self, *, is_heard: bool) -> None:
        """Waits until the terminal reports the mouse, as Textual has it do, or does not."""
        deadline = time.monotonic() + SECONDS_MAX
        wanted = "1" if is_heard else "0"
        while self._run("display-message", "-p", "-t", "s", "#{mouse_any_flag}").strip() != wanted:
            assert time.monotonic() < deadline, f"the mouse is not as wanted in\n{self.screen()}"
            time.sleep(0.05)

    def pid(self) -> int:
        """Returns the number of the program's process."""
        return int(self._run("display-message", "-p", "-t", "s", "#{pane_pid}"))

    def _run(self, *words: str) -> str:
        environment = {**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
        environment.pop("TMUX", None)
        done = subprocess.run(
            ["tmux", "-L", self._name, *words],
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, f"tmux {' '.join(words)}: {done.stderr}"
        return done.stdout
