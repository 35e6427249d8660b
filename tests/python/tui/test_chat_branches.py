"""`branching chat`: the branches of an open fork."""

from __future__ import annotations

from typing import Any

import pytest
from support.screen import until_shown
from textual.pilot import Pilot

from branching.agent.types import BranchSpec
from branching.tui.chat import app as chat_module

from .chat_harness import ChatHarness, answer, enter, in_chat, one, two


@pytest.mark.contract("K5")
@in_chat
async def test_fork_diff_lists_each_touched_path_of_each_branch(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    await harness.fork(one("write seed.txt"), two("write seed.txt"), BranchSpec("x", "write own"))
    await until_shown(pilot, "✓ one", "✓ two", "✓ x")
    await enter(pilot, "/fork diff")
    await until_shown(pilot, "3 file(s)", "M seed.txt · one (split)", "M seed.txt · two (split)")
    await until_shown(pilot, "A own · x (unique)", "+    1 x", "hunk 1/1")
    await pilot.press("right")
    await until_shown(pilot, "1 seed", "~    1 one")
    await pilot.press("right")
    await until_shown(pilot, "~    1 two")
    await pilot.press("escape")
    await enter(pilot, "/fork diff own")
    await until_shown(pilot, "1 file(s)", "A own · x", "+    1 x")
    await pilot.press("escape")


@pytest.mark.contract("K8")
@in_chat
async def test_tabs_show_states_the_tab_key_cycles_and_the_badge_counts(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    await harness.fork(
        one("wait"), two("write b"), BranchSpec("bad", "fail"), BranchSpec("gone", "wait")
    )
    ids = {branch.spec.label: branch.id for branch in harness.session.branches}
    await harness.session.coordinator.terminate_branch(ids["gone"])
    await until_shown(pilot, "2 ● one", "3 ✓ two", "4 ✗ bad", "5 ⊘ gone", "FORK: 4 · 1 …")
    await until_shown(pilot, "ValueError: bad was told to fail")
    for said in ("one hears wait", "two has done it", "bad hears fail", "gone is terminated"):
        await pilot.press("tab")
        await until_shown(pilot, said)
    await pilot.press("tab")
    await until_shown(pilot, "Forked: one, two, bad, gone")
    harness.script.goes_on.add("one")
    await until_shown(pilot, "2 ✓ one", "FORK: 4")
    assert "…" not in harness.session.badge


@pytest.mark.contract("K8")
@in_chat
async def test_a_fork_without_budget_left_is_marked(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    assert await harness.session.fork([one("wait"), two("wait")], aggregate_usd=0.03)
    await until_shown(pilot, "$$ ", "agg-exhausted")


@pytest.mark.contract("K9")
@in_chat
async def test_a_message_goes_to_its_branch_alone_or_is_rejected(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    await harness.fork(one(), BranchSpec("one more", "wait"), two("write b"))
    await until_shown(pilot, "✓ two")
    await enter(pilot, ">>one try the cache")
    await until_shown(pilot, "sent to one: try the cache")
    await enter(pilot, ">>one more and this")
    await until_shown(pilot, "sent to one more: and this")
    by_id = harness.session.branches[0].id
    await enter(pilot, f">>{by_id} by its id")
    await until_shown(pilot, "sent to one: by its id")
    expected = [("one", "try the cache"), ("one more", "and this"), ("one", "by its id")]
    assert harness.script.controlled == expected
    await enter(pilot, ">>three hello")
    await until_shown(pilot, "! no branch is called 'three'; there are: one, one more, two")
    await enter(pilot, ">>one")
    await until_shown(pilot, "! >>one has no text")
    await enter(pilot, ">>two hello")
    await until_shown(pilot, "! two is done and cannot receive messages")
    assert harness.script.controlled == expected


@pytest.mark.contract("K9")
@in_chat
async def test_an_exclamation_mark_runs_a_shell_command_in_the_tabs_directory(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    await harness.fork(one("write a"))
    await until_shown(pilot, "✓ one")
    await pilot.press("tab")
    await enter(pilot, "!cat a; echo $BRANCHING_BRANCH; exit 3")
    await until_shown(pilot, "> !cat a", "exit", "3")
    [branch] = harness.session.branches
    assert branch.branch is not None
    await until_shown(pilot, branch.branch.name)
    await pilot.press("tab")
    await enter(pilot, "!ls a")
    await until_shown(pilot, "No such file")


@pytest.mark.contract("K10")
@in_chat
async def test_an_open_fork_allows_only_some_commands(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    await harness.fork(one(), two("write b"))
    await until_shown(pilot, "✓ two")
    for line in ("/fork", "/fork-branches 3", "/fork-budget clear", "/fork-model clear"):
        await enter(pilot, line)
        await until_shown(pilot, f"! {line.split()[0]} has to wait: a fork is open")
    await enter(pilot, "plain words")
    await until_shown(pilot, "! a fork is open: >>label sends a message to a branch")
    for line, said in (
        ("/cost", "together: $0.04"),
        ("/tokens", "together: 200 tokens"),
        ("/version", "branching 0."),
        ("/help", "/merge  "),
    ):
        await enter(pilot, line)
        await until_shown(pilot, said)
    await pilot.press("tab")
    await enter(pilot, "plain words")
    await until_shown(pilot, "! one is running: only a branch that is done can continue")
    await enter(pilot, "/copy")
    await until_shown(pilot, "copied")
    assert "one hears wait" in pilot.app.clipboard


@pytest.mark.contract("K10")
@in_chat
async def test_a_prompt_on_the_tab_of_a_finished_branch_continues_it(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    await enter(pilot, "/fork-strategy manual")
    await harness.fork(one("write a"), two("write b"))
    await until_shown(pilot, "✓ one", "✓ two")
    await pilot.press("tab")
    await enter(pilot, "write c and wait")
    await until_shown(pilot, "2 ● one", "> write c and wait", "FORK: 2 · 1 …")
    harness.script.goes_on.add("one")
    await until_shown(pilot, "2 ✓ one")
    await enter(pilot, "/merge")
    await until_shown(pilot, "which branch wins?")
    await answer(pilot, "1")
    await until_shown(pilot, "Merged: kept branch one", "2 files applied: a, c")
    assert len(harness.session.conversation.history) == 4


@pytest.mark.contract("K11")
@in_chat
async def test_output_is_shown_token_by_token(harness: ChatHarness, pilot: Pilot[Any]) -> None:
    await harness.fork(one())
    [branch] = harness.session.branches
    await pilot.press("tab")
    await until_shown(pilot, "one hears wait")
    for piece, seen in (("half a ", "half a"), ("line", "half a line"), ("\nnext", "next")):
        harness.session.heard(branch.id, piece)
        await until_shown(pilot, seen)
    assert chat_module.STATES_SECONDS == 0.5


@pytest.mark.contract("K12")
@in_chat
async def test_escape_terminates_a_branch_or_aborts_the_fork_after_confirmation(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    await harness.fork(one(), two())
    await pilot.press("tab")
    await until_shown(pilot, "one hears wait")
    await pilot.press("escape")
    await until_shown(pilot, "Terminate branch 'one'?")
    await pilot.press("escape")
    await until_shown(pilot, "2 ● one")
    await pilot.press("escape")
    await until_shown(pilot, "Terminate branch 'one'?")
    await pilot.press("y")
    await until_shown(pilot, "2 ⊘ one", "3 ● two")
    await pilot.press("shift+tab")
    await until_shown(pilot, "Forked: one, two")
    await pilot.press("escape")
    await until_shown(pilot, "Abort the fork, with all its 2 branches?")
    await pilot.press("y")
    await until_shown(pilot, "Aborted: no branch was kept")
    assert not harness.session.is_forked
    assert harness.space.branches() == []


@pytest.mark.contract("K13")
@in_chat
async def test_approval_requests_of_branches_open_a_dialog(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    await harness.fork(one("ask"), two("ask"))
    await until_shown(pilot, "one asks to call shell", "rm -rf build", "[y] approve")
    await answer(pilot, "y")
    await until_shown(pilot, "two asks to call shell")
    await pilot.press("escape")  # later
    await until_shown(pilot, "✓ one", "3 ● two")
    await pilot.press("tab")
    await until_shown(pilot, "two asks to call shell")
    await answer(pilot, "n")
    await until_shown(pilot, "3 ✓ two")
    said = {
        branch.spec.label: [line.text for line in harness.session.said.lines(branch.id)]
        for branch in harness.session.branches
    }
    assert "the answer is approve" in said["one"]
    assert "the answer is deny" in said["two"]
    assert "denied: shell rm -rf build" in said["two"]


@pytest.mark.contract("K13")
@in_chat
async def test_approval_requests_of_the_parent_open_a_dialog(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    await enter(pilot, "ask first")
    await until_shown(pilot, "the agent asks to call shell", "make clean")
    await answer(pilot, "y")
    await until_shown(pilot, "the answer is approve", "parent has done it")


@pytest.mark.contract("K13")
@in_chat
async def test_the_dialog_closes_when_the_request_is_no_longer_pending(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    await harness.fork(one("ask"))
    await until_shown(pilot, "one asks to call shell")
    [branch] = harness.session.branches
    await harness.session.coordinator.terminate_branch(branch.id)
    await answer(pilot, "y")
    await until_shown(pilot, "2 ⊘ one")


@pytest.mark.contract("K15")
@in_chat
async def test_a_branch_cannot_be_forked_from_its_tab(
    harness: ChatHarness, pilot: Pilot[Any]
) -> None:
    await harness.fork(one("write a"))
    await until_shown(pilot, "✓ one")
    await pilot.press("tab")
    await enter(pilot, "/fork")
    await until_shown(pilot, "! /fork has to wait: a fork is open")
    assert len(harness.session.branches) == 1
