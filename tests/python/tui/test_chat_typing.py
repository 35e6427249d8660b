"""`branching chat`: input while windows open, and the display of messages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.screen import shown, until, until_shown
from textual.pilot import Pilot

from branching import Workspace
from branching.agent.judge import Panel
from branching.errors import BranchingError
from branching.tui import dialogs
from branching.tui.chat import pydantic_agent
from branching.tui.chat.app import Chat

from .chat_harness import ChatHarness, answer, enter, in_chat, one, two


def typed(pilot: Pilot[Any]) -> str:
    """Returns what stands in the prompt, also behind a window."""
    assert isinstance(pilot.app, Chat)
    return pilot.app._prompt.value


@contextmanager
def typing_without_a_pause() -> Iterator[Callable[[Pilot[Any], str], Awaitable[None]]]:
    """Keys in the `with` come quickly enough for a window, however slow the machine is.

    Yields what presses the last of them, after which the window takes answers.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dialogs, "QUIET_SECONDS", 3600.0)

        async def ends_with(pilot: Pilot[Any], key: str) -> None:
            patched.setattr(dialogs, "QUIET_SECONDS", 0.2)
            await pilot.press(key)

        yield ends_with


@in_chat
async def test_an_approval_takes_no_key_of_a_sentence_that_is_being_typed(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    """The letters n, y and space come while the window opens; they belong to the sentence."""
    with typing_without_a_pause() as ends_with:
        await enter(pilot, "ask")
        await until_shown(pilot, "the agent asks to call shell")
        for key in ("n", "y", "e", "s", "space"):
            await pilot.press(key)
        assert harness.session.approvals(), "no answer was taken"
        assert typed(pilot) == "nyes "
        assert "approve" not in shown(pilot.app)
        await ends_with(pilot, "y")
    await answer(pilot, "n")
    await until_shown(pilot, "the answer is deny")
    assert typed(pilot) == "nyes y"


@in_chat
async def test_a_line_that_is_finished_behind_a_window_is_sent(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    await enter(pilot, "ask")
    await until_shown(pilot, "the agent asks to call shell")
    for key in ("slash", "v", "x", "backspace", *"ersion", "enter"):
        await pilot.press(key)
    await until(pilot, lambda: not typed(pilot), "the line is sent")
    said = [line.text for line in harness.session.said.lines("")]
    assert any(text.startswith("branching 0.") for text in said)
    await answer(pilot, "y")
    await until_shown(pilot, "the answer is approve")


@in_chat
async def test_the_picker_takes_no_key_of_a_sentence_that_is_being_typed(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    harness.judge.confidence = 0.1
    await harness.fork(one("write a"), two("wait"))
    await until_shown(pilot, "✓ one")
    with typing_without_a_pause() as ends_with:
        await enter(pilot, "/merge")
        await until_shown(pilot, "waiting for all branches")
        for key in "do step ":
            await pilot.press("space" if key == " " else key)
        harness.script.goes_on.add("two")
        await until_shown(pilot, "which branch wins?")
        for key in ("1", "space", "f"):
            await pilot.press(key)
        assert harness.session.is_forked
        await ends_with(pilot, "o")
    assert typed(pilot) == "do step 1 fo"
    await answer(pilot, "2")
    await until_shown(pilot, "Merged: kept branch two")


@in_chat
async def test_merge_on_the_tab_of_a_branch_says_there_that_it_waits(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    await harness.fork(one("wait"), two("write b"))
    await until_shown(pilot, "✓ two")
    await pilot.press("tab", "tab")
    await until_shown(pilot, "two has done it")
    await enter(pilot, "/merge")
    await until_shown(pilot, "two has done it", "waiting for all branches and the judge")
    harness.script.goes_on.add("one")
    await until_shown(pilot, "The judge chose one")
    await answer(pilot, "enter")
    await until_shown(pilot, "Merged: kept branch one")


@in_chat
async def test_the_transcript_wraps_anew_when_the_terminal_changes_its_width(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    words = [f"word{number:02}" for number in range(30)]
    harness.session.note(" ".join(words))
    harness.session.said.heard("", " ".join(words).replace("word", "said") + "\n")
    await until_shown(pilot, *words)
    for columns in (40, 120, 80):
        await pilot.resize_terminal(columns, 24)
        await until_shown(pilot, *words, *(word.replace("word", "said") for word in words))


@in_chat
async def test_messages_of_an_agent_are_markdown_and_keep_their_lines(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    text = (
        "# Plan\n- **first** step\nplain\nlines\n```python\nx  = 1  # two spaces\n```\n"
        "[a link](http://example.org)\x1b]8;;http://evil\x1b\\\n"
    )
    for piece in (text[:20], text[20:50], text[50:]):
        harness.session.said.heard("", piece)
    await until_shown(pilot, " • first step", "x  = 1  # two spaces", "http://example.org")
    screen = shown(pilot.app)
    assert "**" not in screen
    assert "```" not in screen
    assert "evil" not in screen
    lines = [line.strip() for line in screen.splitlines()]
    assert "plain" in lines or "plain" in [line.lstrip("• ") for line in lines]
    assert "lines" in lines


@in_chat
async def test_the_fork_window_shows_a_new_row_when_the_last_one_is_filled(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    await enter(pilot, "/fork")
    await until_shown(pilot, "Fork: label")
    assert shown(pilot.app).count("provider:model") == 1

    def rows() -> int:
        return shown(pilot.app).count("usd")

    assert rows() == 2
    await pilot.press(*"a", "tab", *"x", "tab", "tab", "tab", *"b")
    await until(pilot, lambda: rows() == 3, "a third row")
    await pilot.press("tab", *"y", "enter")
    await until(pilot, lambda: len(harness.session.branches) == 2, "two branches")


def test_a_model_that_cannot_be_used_is_refused_before_the_first_message(
    monkeypatch: pytest.MonkeyPatch, real_workspace: Workspace
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    for name in ("openai:gpt-5-mini", "nobody:model"):
        with pytest.raises(BranchingError, match=f"the model '{name}' cannot be used"):
            asyncio.run(
                pydantic_agent.open_session(
                    real_workspace, pydantic_agent.default_agent(None), model=name
                )
            )


def test_the_judge_has_the_model_of_the_agent_by_default(real_workspace: Workspace) -> None:
    asked: list[object] = []

    async def open_and_ask() -> None:
        session = await pydantic_agent.open_session(
            real_workspace, pydantic_agent.default_agent(None), model="test"
        )
        try:
            judge = session.coordinator.judge
            assert isinstance(judge, Panel)
            assert judge._model_judge is not None
            asked.append(judge._model_judge("anthropic:claude-haiku-4-5"))
        finally:
            await session.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pydantic_agent, "model_judge", lambda model: model)
        asyncio.run(open_and_ask())
    assert asked == ["test"]
