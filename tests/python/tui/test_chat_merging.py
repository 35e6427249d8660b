"""`branching chat`: how a fork ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.screen import until, until_shown
from textual.pilot import Pilot

from branching._difftool import EditorDetector

from .chat_harness import ChatHarness, answer, enter, in_chat, one, two


@pytest.mark.contract("K6", "K14")
@in_chat
async def test_the_picker_merges_by_number_and_the_conversation_continues(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    await enter(pilot, "/fork-strategy manual")
    await enter(pilot, "first")
    await until_shown(pilot, "parent has done it")
    await until(pilot, lambda: not harness.session.conversation.is_in_flight, "the run has ended")
    await harness.fork(one("write a"), two("write b"))
    await until_shown(pilot, "✓ one", "✓ two")
    await enter(pilot, "/merge")
    await until_shown(pilot, "which branch wins?", "1 ✓ one: done · 2 turns", "2 ✓ two")
    await answer(pilot, "2")
    await until_shown(pilot, "Merged: kept branch two", "1 file applied: b")
    assert (harness.space.base / "b").read_text() == "two\n" * 3
    assert not (harness.space.base / "a").exists()
    said = [message["content"] for message in harness.session.conversation.history]
    assert said == ["first", "parent did: first", "write b", "two did: write b"]
    assert harness.session.badge == ""
    assert harness.judge.asked == 0


@pytest.mark.contract("K6")
def test_o_opens_the_editor_and_returns_to_the_picker(
    harness: ChatHarness, monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    monkeypatch.setenv("BRANCHING_DIFFTOOL", f"echo {{parent}} {{branches}} >'{place}/opened' #")

    async def act(pilot: Pilot[Any]) -> None:
        await enter(pilot, "/fork-strategy manual")
        await harness.fork(one("write a"))
        await until_shown(pilot, "✓ one")
        await enter(pilot, "/merge")
        await until_shown(pilot, "which branch wins?")
        await answer(pilot, "o")
        opened = place / "opened"
        await until(pilot, lambda: opened.exists() and opened.read_text(), "the editor was called")
        [branch] = harness.session.branches
        assert str(branch.path) in opened.read_text()
        await until_shown(pilot, "which branch wins?")
        await pilot.press("escape")

    harness.run(act)


@pytest.mark.contract("K6")
def test_o_shows_the_differences_if_there_is_no_editor(
    harness: ChatHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BRANCHING_DIFFTOOL", "PYDANTIC_DEEP_DIFFTOOL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(EditorDetector, "detect", staticmethod(lambda: "tui"))

    async def act(pilot: Pilot[Any]) -> None:
        await enter(pilot, "/fork-strategy manual")
        await harness.fork(one("write a"))
        await until_shown(pilot, "✓ one")
        await enter(pilot, "/merge")
        await until_shown(pilot, "which branch wins?")
        await answer(pilot, "o")
        await until_shown(pilot, "A a · one")
        await pilot.press("escape")
        await until_shown(pilot, "which branch wins?")
        await answer(pilot, "enter")
        await until_shown(pilot, "Merged: kept branch one")

    harness.run(act)


@pytest.mark.contract("K6")
@pytest.mark.parametrize("kind", ["auto", "vote"])
def test_an_automatic_merge_can_be_overridden(harness: ChatHarness, kind: str) -> None:
    async def act(pilot: Pilot[Any]) -> None:
        await enter(pilot, f"/fork-strategy {kind}")
        await harness.fork(one("write a"), two("write b"))
        await until_shown(pilot, "✓ one", "✓ two")
        await enter(pilot, "/merge")
        await until_shown(pilot, "Merged: kept branch one", "/override LABEL")
        await enter(pilot, "/override two")
        await until_shown(pilot, "Merged: kept branch two")
        assert not (harness.space.base / "a").exists()
        assert (harness.space.base / "b").exists()

    harness.run(act)


@pytest.mark.contract("K7")
@in_chat
async def test_a_confident_choice_of_the_judge_is_accepted_after_viewing_the_diff(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    await harness.fork(one("write a"), two("write b"))
    await until_shown(pilot, "✓ one", "✓ two")
    await enter(pilot, "/merge")
    await until_shown(pilot, "The judge chose one", "0.90 sure: one is best")
    await answer(pilot, "d")
    await until_shown(pilot, "A a · one", "A b · two")
    await pilot.press("escape")
    await until_shown(pilot, "The judge chose one")
    await pilot.press("escape")
    assert harness.session.is_forked
    await enter(pilot, "/merge")
    await until_shown(pilot, "The judge chose one")
    assert harness.judge.asked == 1, "the same question is not asked twice"
    await answer(pilot, "enter")
    await until_shown(pilot, "Merged: kept branch one")


@pytest.mark.contract("K7")
@in_chat
async def test_o_opens_the_picker_with_the_judges_choice_and_reason(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    harness.judge.label = "two"
    await harness.fork(one("write a"), two("write b"))
    await until_shown(pilot, "✓ one", "✓ two")
    await enter(pilot, "/merge")
    await until_shown(pilot, "The judge chose two")
    await answer(pilot, "o")
    await until_shown(pilot, "which branch wins?", "two is best")
    await answer(pilot, "up", "enter")  # two is chosen already; one is above it
    await until_shown(pilot, "Merged: kept branch one")


@pytest.mark.contract("G3")
@in_chat
async def test_below_the_threshold_the_picker_asks(harness: ChatHarness, pilot: Pilot[Any]) -> None:
    harness.judge.label, harness.judge.confidence = "two", 0.3
    await harness.fork(one("write a"), two("write b"))
    await until_shown(pilot, "✓ one", "✓ two")
    await enter(pilot, "/merge")
    await until_shown(pilot, "which branch wins?", "0.30 sure: two is best")
    await answer(pilot, "enter")
    await until_shown(pilot, "Merged: kept branch two")


@in_chat
async def test_a_judge_that_fails_leaves_the_choice_to_the_person(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    harness.judge.label = "nobody"
    await harness.fork(one("write a"))
    await until_shown(pilot, "✓ one")
    await enter(pilot, "/merge")
    await until_shown(pilot, "which branch wins?", "no judgement")
    await answer(pilot, "1")
    await until_shown(pilot, "Merged: kept branch one")
