"""`branching chat`: the commands that configure a fork, and the picker."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.screen import shown, until, until_shown
from textual.pilot import Pilot
from textual.widgets import Input

from branching.tui.chat.transcripts import OVERVIEW

from .chat_harness import ChatHarness, enter, in_chat, one


@pytest.mark.contract("K1")
@in_chat
async def test_the_picker_has_a_row_per_branch_with_model_and_budget_and_an_aggregate_row(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    await enter(pilot, "/fork-branches 2")
    await enter(pilot, "/fork")
    await until_shown(pilot, "Fork: label", "1  label      instruction", "2  label", "all together")
    await pilot.press("enter")
    await until_shown(pilot, "no branch has a label")

    async def fill(name: str, value: str) -> None:
        pilot.app.screen.query_one(f"#{name}-1", Input).value = value
        await pilot.press("enter")

    await fill("label", "one")
    await until_shown(pilot, "'one' needs a label and an instruction")
    pilot.app.screen.query_one("#instruction-1", Input).value = "wait"
    await fill("model", "nobody")
    await until_shown(pilot, "names no provider")
    pilot.app.screen.query_one("#usd-1", Input).value = "0.5"
    await fill("model", "nobody:m")
    await until_shown(pilot, "Forked: one", "● one", "$0.02 of $0.50")
    assert harness.script.models == {"one": "nobody:m"}


@pytest.mark.contract("K1")
@in_chat
async def test_fork_is_refused_while_a_run_is_in_flight_or_a_fork_is_open(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    await enter(pilot, "please wait")
    await until(pilot, lambda: harness.session.conversation.is_in_flight, "a run is in flight")
    await enter(pilot, "/fork")
    await until_shown(pilot, "! a run is in progress; fork when it has ended")
    await enter(pilot, "and more")
    await until_shown(pilot, "! a run is in progress; Escape stops it")
    harness.script.goes_on.add("parent")
    await until_shown(pilot, "parent has done it")
    await until(pilot, lambda: not harness.session.conversation.is_in_flight, "the run has ended")
    await harness.fork(one())
    await enter(pilot, "/fork")
    await until_shown(pilot, "! /fork has to wait: a fork is open")


ANSWERS = (
    ("/fork-branches", "a fork has up to 10 branches"),
    ("/fork-branches 3", "a fork has up to 3 branches"),
    ("/fork-branches 0", "! a fork has 1 to 10 branches, not 0"),
    ("/fork-branches 11", "! a fork has 1 to 10 branches, not 11"),
    ("/fork-branches x", "! write /fork-branches N"),
    ("/fork-budget", "budget of a branch: none; of all together: none"),
    ("/fork-budget per-branch 0.5", "budget of a branch: $0.50; of all together: none"),
    ("/fork-budget aggregate $2", "budget of a branch: $0.50; of all together: $2.00"),
    ("/fork-budget aggregate -1", "! a budget is more than $0"),
    ("/fork-budget aggregate nan", "! a budget is more than $0"),
    ("/fork-budget both 1", "! write /fork-budget"),
    ("/fork-budget clear", "no budgets"),
    ("/fork-model 1 openai:gpt", "models of branches: 1: openai:gpt"),
    ("/fork-model 1 gpt", "! 'gpt' names no provider"),
    ("/fork-model 0 openai:gpt", "! write /fork-model"),
    ("/fork-model 99 openai:gpt", "! a fork has up to"),
    ("/fork-model 1 clear", "models of branches: that of the chat"),
    ("/fork-model clear", "every branch has the model of the chat"),
    ("/fork-strategy vote", "the winner is chosen: vote"),
    ("/fork-strategy best", "! write /fork-strategy and one of manual, auto"),
    ("/nonsense", "! /nonsense is not a command"),
    (">>nobody hello", "! no branch is called 'nobody'; there are: none"),
    ("/merge", "! there is no fork to merge"),
    ("/fork diff", "! there is no fork to compare"),
    ("/cost", "nothing was forked yet"),
    ("/version", "branching 0."),
    ("/help", "/fork-budget per-branch|aggregate"),
    ("/copy", "! there is nothing to copy"),
)
"""What is typed in one chat, line by line, and what is said to it."""


@pytest.mark.contract("K2", "K3", "K4", "K10")
@in_chat
async def test_each_command_shows_its_answer(harness: ChatHarness, pilot: Pilot[Any]) -> None:
    for line, said in ANSWERS:
        before = harness.session.said.count(OVERVIEW)
        await enter(pilot, line)
        await until(pilot, lambda: harness.session.said.count(OVERVIEW) > before, f"{line}: {said}")  # noqa: B023
        newest = harness.session.said.lines(OVERVIEW)[-1]
        assert said.removeprefix("! ") in newest.text, line
        assert said.startswith("! ") == (newest.who == "error"), line
        await until_shown(pilot, said)


@pytest.mark.contract("K2", "K3", "K4")
def test_fork_settings_are_saved_and_used(harness: ChatHarness) -> None:
    async def settle(pilot: Pilot[Any]) -> None:
        await enter(pilot, "/fork-branches 2")
        await enter(pilot, "/fork-budget per-branch 0.25")
        await enter(pilot, "/fork-budget aggregate 1")
        await enter(pilot, "/fork-model 2 openai:gpt")
        await until_shown(pilot, "models of branches: 2: openai:gpt")

    async def use(pilot: Pilot[Any]) -> None:
        await enter(pilot, "/fork")
        await until_shown(pilot, "Fork: label")
        lines = shown(pilot.app).splitlines()
        rows = {name: line for line in lines for name in "123" if f"{name}  label" in line}
        assert "0.25" in rows["1"]
        assert "openai:gpt" in rows["2"]
        assert "3" not in rows
        assert any("all together" in line and "1" in line for line in lines)
        await pilot.press("escape")

    harness.run(settle)
    harness.run(use)
    assert json.loads(harness.settings.read_text())["branches"] == 2


@pytest.mark.contract("K2")
def test_a_damaged_settings_file_is_reported_and_ignored(harness: ChatHarness) -> None:
    harness.settings.parent.mkdir()
    harness.settings.write_text('{"branches": 99}')

    async def act(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "cannot be used", "the defaults are used")
        assert harness.session.settings.branches == 10

    harness.run(act)
