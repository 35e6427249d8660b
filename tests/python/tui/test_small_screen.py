"""The chat on a screen of 40 by 10: no necessary text is cut off."""

from __future__ import annotations

import asyncio
from typing import Any

from support.screen import shown, until, until_shown
from textual.pilot import Pilot
from textual.widgets import Input

from branching.agent.types import BranchSpec

from .chat_harness import ChatHarness, answer, enter, one, two

SMALL = (40, 10)


def test_the_picker_shows_its_keys(harness: ChatHarness) -> None:
    async def act(pilot: Pilot[Any]) -> None:
        harness.judge.label = "nobody"
        await harness.fork(*(BranchSpec(f"branch {n}", "done " * 20) for n in range(5)))
        await enter(pilot, "/merge")
        await until_shown(pilot, "which branch wins", "1 ", "[1-9, enter] merge", "[escape] back")
        await pilot.press("down", "down", "down", "down")
        await until_shown(pilot, "5 ", "branch 4")
        await pilot.press("escape")

    harness.run(act, SMALL)


def test_the_choice_of_the_judge_shows_its_keys(harness: ChatHarness) -> None:
    async def act(pilot: Pilot[Any]) -> None:
        harness.judge.reasoning = "because " * 60
        await harness.fork(one("done"), two("done"))
        await enter(pilot, "/merge")
        await until_shown(pilot, "The judge chose", "[enter] accept", "[escape] back")
        await pilot.press("escape")

    harness.run(act, SMALL)


def test_a_fork_is_made(harness: ChatHarness) -> None:
    """Each field has room for what is typed, and the one with the focus is in sight."""

    async def act(pilot: Pilot[Any]) -> None:
        await enter(pilot, "/fork")
        await until_shown(pilot, "Fork: label", "[enter] fork", "[escape] back", "all together")
        for text in ("one", "wait for it", "nobody:model", "0.5", "two", "wait, too"):
            await pilot.press(*text)
            await until_shown(pilot, text)
            focused = pilot.app.screen.focused
            assert isinstance(focused, Input)
            assert focused.size.width >= 6
            await pilot.press("tab")
        await pilot.press("enter")
        await until(pilot, lambda: len(harness.session.branches) == 2, "two branches")
        assert "two" in shown(pilot.app)

    harness.run(act, SMALL)


def test_an_approval_shows_its_keys(harness: ChatHarness) -> None:
    async def act(pilot: Pilot[Any]) -> None:
        asked = asyncio.create_task(
            harness.session.conversation.approvals.ask(request("argument " * 80))
        )
        await until_shown(pilot, "the agent asks to call delete", "[y] approve", "[n] deny")
        await answer(pilot, "n")
        assert await asked == "deny"

    harness.run(act, SMALL)


def request(arguments: str) -> Any:
    from branching.agent.approvals import ApprovalRequest

    return ApprovalRequest(tool="delete", arguments=arguments)
