"""`branching chat`: talking, failing, leaving, and being seen from outside."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.screen import shown, until, until_shown
from textual import events
from textual.pilot import Pilot
from textual.widgets import Input

from branching import BranchError
from branching.runlog.control_socket import send_request
from branching.runlog.run_log import Entry, read_entries

from .chat_harness import ChatHarness, enter, in_chat, one, two


@in_chat
async def test_escape_stops_the_parents_run(harness: ChatHarness, pilot: Pilot[Any]) -> None:
    await enter(pilot, "please wait")
    await until_shown(pilot, "parent hears please wait")
    await pilot.press("escape")
    await until_shown(pilot, "Stop the run?")
    await pilot.press("y")
    await until_shown(pilot, "· stopped")
    assert harness.session.conversation.history == []


@in_chat
async def test_a_fork_that_cannot_be_made_says_why(harness: ChatHarness, pilot: Pilot[Any]) -> None:
    assert not await harness.session.fork([one(), one()])
    await until_shown(pilot, "! nothing was forked")
    assert not harness.session.is_forked


@in_chat
async def test_a_failed_run_says_why_and_the_conversation_stays(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    await enter(pilot, "fail please")
    await until_shown(pilot, "! the run failed: parent was told to fail")
    assert harness.session.conversation.history == []


@in_chat
async def test_messages_of_agents_cannot_control_the_screen(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    await enter(pilot, "say \x1b[2J\x1b]0;t\x07 this")
    await until_shown(pilot, "parent has done it")
    assert "\x1b" not in shown(pilot.app)


def test_to_quit_with_an_open_fork_asks_and_leaves_nothing(harness: ChatHarness) -> None:
    async def act(pilot: Pilot[Any]) -> None:
        await harness.fork(one())
        await enter(pilot, "/quit")
        await until_shown(pilot, "A fork is open. What runs in it is stopped.")
        await pilot.press("escape")
        await until_shown(pilot, "2 ● one")
        await enter(pilot, "/quit")
        await until_shown(pilot, "A fork is open")
        await pilot.press("y")
        await until(pilot, lambda: not pilot.app.is_running, "it has ended")

    harness.run(act)
    assert harness.space.branches() == []


@in_chat
async def test_keys_typed_together_are_read_in_order(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    """Keys come faster than they are drawn: Enter ends the line that was there when it came."""
    for character in "/fork-strategy manual\r/fork-branches 2\r/help":
        key = events.Key("enter", "\r") if character == "\r" else events.Key("x", character)
        pilot.app.post_message(key)
    await until_shown(pilot, "the winner is chosen: manual", "a fork has up to 2 branches", "/help")
    assert pilot.app.screen.query_one("#prompt", Input).value == "/help"


@in_chat
async def test_a_line_typed_ahead_is_the_next_line(harness: ChatHarness, pilot: Pilot[Any]) -> None:
    prompt = pilot.app.screen.query_one("#prompt", Input)
    prompt.value = "first"
    await prompt.action_submit()
    prompt.insert_text_at_cursor("next")
    await until_shown(pilot, "parent hears first")
    assert prompt.value == "next"


def test_a_fork_is_seen_and_steered_from_another_process(harness: ChatHarness) -> None:
    """`branching watch` reads the entries with cost, state and output, and the control socket."""
    logs = harness.space.base / ".branching" / "logs"

    def entries() -> dict[str, Entry]:
        return {entry.label.split(":")[0]: entry for entry in read_entries(logs)}

    async def act(pilot: Pilot[Any]) -> None:
        await harness.fork(one(), two("write b"))
        await until(pilot, lambda: len(entries()) == 2, "both are known")
        await until(pilot, lambda: entries()["two"].state == "done", "the second is done")
        first = entries()["one"]
        assert (first.command, first.state, first.cost_usd) == ("chat", "running", 0.02)
        assert first.branch in {record.name for record in harness.space.branches()}
        door = logs / first.door
        runner = harness.session.branches[0].runner
        await asyncio.to_thread(send_request, door, "pause", first.branch)
        await until(pilot, lambda: entries()["one"].state == "paused", "it is paused")
        await until_shown(pilot, "paused")
        assert harness.session.branches[0].pause.is_on
        await asyncio.to_thread(send_request, door, "resume", first.branch)
        await until(pilot, lambda: entries()["one"].state == "running", "it goes on")
        harness.session.branches[0].runner = None
        with pytest.raises(BranchError, match="cannot pause it"):
            await asyncio.to_thread(send_request, door, "pause", first.branch)
        harness.session.branches[0].runner = runner
        await asyncio.to_thread(send_request, door, "tell", first.branch, "try the cache")
        assert harness.script.controlled == [("one", "try the cache")]
        await asyncio.to_thread(send_request, door, "stop", first.branch)
        await until(pilot, lambda: entries()["one"].state == "terminated", "it is stopped")
        assert "one hears wait" in (logs / f"{first.branch}.log").read_text()
        assert await harness.session.merging.pick(harness.session.branches[1].id)
        await until(pilot, lambda: entries()["two"].state == "won", "the second has won")

    harness.run(act)
