"""A chat under test: a workspace, scripted agents, a screen."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any

from support.screen import piloted, until_shown
from textual.pilot import Pilot
from textual.widgets import Input

from branching import Workspace
from branching.agent.types import BranchSpec
from branching.tui.chat.app import Chat
from branching.tui.chat.session import ChatSession

from .scripted_chat import Script, ScriptedJudge, new_session


class ChatHarness:
    """The parts of a chat under test; the fixture is `harness`."""

    def __init__(self, space: Workspace, settings: Path) -> None:
        self.space = space
        self.settings = settings
        self.script = Script()
        self.judge = ScriptedJudge()
        self.session: ChatSession

    def run(
        self, act: Callable[[Pilot[Any]], Awaitable[None]], size: tuple[int, int] = (80, 24)
    ) -> None:
        """Opens the chat, acts in it, and closes it."""
        self.session = new_session(self.space, self.settings, self.script, self.judge)

        async def whole(pilot: Pilot[Any]) -> None:
            try:
                await act(pilot)
            finally:
                await self.session.close()

        piloted(Chat(self.session), whole, size=size)

    async def fork(self, *specs: BranchSpec) -> None:
        assert await self.session.fork(specs)


def in_chat(
    scene: Callable[[ChatHarness, Pilot[Any]], Coroutine[Any, Any, None]],
) -> Callable[[ChatHarness], None]:
    """Turns a coroutine into a test that runs it in its own chat."""

    @wraps(scene)
    def test(harness: ChatHarness) -> None:
        harness.run(lambda pilot: scene(harness, pilot))

    del test.__wrapped__  # pytest would look for its arguments
    return test


async def enter(pilot: Pilot[Any], text: str) -> None:
    """Types a line into the prompt, as pasting it does."""
    prompt = pilot.app.screen.query_one("#prompt", Input)
    prompt.value = text
    await pilot.press("enter")


async def answer(pilot: Pilot[Any], *keys: str) -> None:
    """Presses keys in a window that opened by itself, as soon as it takes answers."""
    await until_shown(pilot, "[escape] back")
    await pilot.press(*keys)


def one(steer: str = "wait", **options: Any) -> BranchSpec:
    return BranchSpec("one", steer, **options)


def two(steer: str = "wait", **options: Any) -> BranchSpec:
    return BranchSpec("two", steer, **options)
