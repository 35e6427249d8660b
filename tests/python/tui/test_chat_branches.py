"""`branching chat`: the branches of an open fork, item by item (K5, K8 to K13, K15)."""

from __future__ import annotations

from typing import Any

from support.screen import until_shown
from textual.pilot import Pilot

from branching.agent.types import BranchSpec
from branching.tui import chat as chat_module

from .room import Room, enter, in_chat, one, two


@in_chat
async def test_k5_fork_diff_shows_touched_paths_times_branches(
    room: Room, pilot: Pilot[Any]
) -> None:
    await room.fork(one("write seed.txt"), two("write seed.txt"), BranchSpec("x", "write own"))
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


@in_chat
async def test_k8_tabs_have_marks_tab_goes_around_and_the_badge_counts(
    room: Room, pilot: Pilot[Any]
) -> None:
    await room.fork(
        one("wait"), two("write b"), BranchSpec("bad", "fail"), BranchSpec("gone", "wait")
    )
    ids = {branch.spec.label: branch.id for branch in room.session.branches}
    await room.session.coordinator.terminate_branch(ids["gone"])
    await until_shown(pilot, "2 ● one", "3 ✓ two", "4 ✗ bad", "5 ⊘ gone", "FORK: 4 · 1 …")
    await until_shown(pilot, "ValueError: bad was told to fail")
    for said in ("one hears wait", "two has done it", "bad hears fail", "gone is terminated"):
        await pilot.press("tab")
        await until_shown(pilot, said)
    await pilot.press("tab")
    await until_shown(pilot, "Forked: one, two, bad, gone")
    room.script.goes_on.add("one")
    await until_shown(pilot, "2 ✓ one", "FORK: 4")
    assert "…" not in room.session.badge


@in_chat
async def test_k8_an_exhausted_fork_is_marked(room: Room, pilot: Pilot[Any]) -> None:
    assert await room.session.fork([one("wait"), two("wait")], aggregate_usd=0.03)
    await until_shown(pilot, "$$ ", "agg-exhausted")


@in_chat
async def test_k9_a_word_goes_to_its_branch_alone_or_nowhere(room: Room, pilot: Pilot[Any]) -> None:
    await room.fork(one(), BranchSpec("one more", "wait"), two("write b"))
    await until_shown(pilot, "✓ two")
    await enter(pilot, ">>one try the cache")
    await until_shown(pilot, "said to one: try the cache")
    await enter(pilot, ">>one more and this")
    await until_shown(pilot, "said to one more: and this")
    by_id = room.session.branches[0].id
    await enter(pilot, f">>{by_id} by its id")
    await until_shown(pilot, "said to one: by its id")
    expected = [("one", "try the cache"), ("one more", "and this"), ("one", "by its id")]
    assert room.script.steered == expected
    await enter(pilot, ">>three hello")
    await until_shown(pilot, "! no branch is called 'three'; there are: one, one more, two")
    await enter(pilot, ">>one")
    await until_shown(pilot, "! >>one says nothing")
    await enter(pilot, ">>two hello")
    await until_shown(pilot, "! two is done and hears nothing")
    assert room.script.steered == expected


@in_chat
async def test_k9_an_exclamation_mark_is_the_shell_where_the_tab_works(
    room: Room, pilot: Pilot[Any]
) -> None:
    await room.fork(one("write a"))
    await until_shown(pilot, "✓ one")
    await pilot.press("tab")
    await enter(pilot, "!cat a; echo $BRANCHING_BRANCH; exit 3")
    await until_shown(pilot, "> !cat a", "exit", "3")
    [branch] = room.session.branches
    assert branch.branch is not None
    await until_shown(pilot, branch.branch.name)
    await pilot.press("tab")
    await enter(pilot, "!ls a")
    await until_shown(pilot, "No such file")


@in_chat
async def test_k10_while_a_fork_is_open_only_these_are_allowed(
    room: Room, pilot: Pilot[Any]
) -> None:
    await room.fork(one(), two("write b"))
    await until_shown(pilot, "✓ two")
    for line in ("/fork", "/fork-branches 3", "/fork-budget clear", "/fork-model clear"):
        await enter(pilot, line)
        await until_shown(pilot, f"! {line.split()[0]} has to wait: a fork is open")
    await enter(pilot, "plain words")
    await until_shown(pilot, "! a fork is open: >>label says something to a branch")
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
    await until_shown(pilot, "! one is running: only a branch that is done goes on")
    await enter(pilot, "/copy")
    await until_shown(pilot, "copied")
    assert "one hears wait" in pilot.app.clipboard


@in_chat
async def test_k10_a_finished_branch_goes_on_with_what_is_typed_on_its_tab(
    room: Room, pilot: Pilot[Any]
) -> None:
    await enter(pilot, "/fork-strategy manual")
    await room.fork(one("write a"), two("write b"))
    await until_shown(pilot, "✓ one", "✓ two")
    await pilot.press("tab")
    await enter(pilot, "write c and wait")
    await until_shown(pilot, "2 ● one", "> write c and wait", "FORK: 2 · 1 …")
    room.script.goes_on.add("one")
    await until_shown(pilot, "2 ✓ one")
    await enter(pilot, "/merge")
    await until_shown(pilot, "which branch wins?")
    await pilot.press("1")
    await until_shown(pilot, "Merged: kept branch one", "2 files applied: a, c")
    assert len(room.session.conversation.history) == 4


@in_chat
async def test_k11_what_is_said_is_seen_piece_by_piece(room: Room, pilot: Pilot[Any]) -> None:
    await room.fork(one())
    [branch] = room.session.branches
    await pilot.press("tab")
    await until_shown(pilot, "one hears wait")
    for piece, seen in (("half a ", "half a"), ("line", "half a line"), ("\nnext", "next")):
        room.session.heard(branch.id, piece)
        await until_shown(pilot, seen)
    assert chat_module.STATES_SECONDS == 0.5


@in_chat
async def test_k12_escape_terminates_a_branch_or_aborts_all_after_a_question(
    room: Room, pilot: Pilot[Any]
) -> None:
    await room.fork(one(), two())
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
    assert not room.session.is_forked
    assert room.space.branches() == []


@in_chat
async def test_k13_approvals_come_to_the_front_and_are_answered(
    room: Room, pilot: Pilot[Any]
) -> None:
    await room.fork(one("ask"), two("ask"))
    await until_shown(pilot, "one asks to call shell", "rm -rf build", "[y] approve")
    await pilot.press("y")
    await until_shown(pilot, "two asks to call shell")
    await pilot.press("escape")  # later
    await until_shown(pilot, "✓ one", "3 ● two")
    await pilot.press("tab")
    await until_shown(pilot, "two asks to call shell")
    await pilot.press("n")
    await until_shown(pilot, "3 ✓ two")
    said = {
        branch.spec.label: [line.text for line in room.session.said.lines(branch.id)]
        for branch in room.session.branches
    }
    assert "the answer is approve" in said["one"]
    assert "the answer is deny" in said["two"]
    assert "denied: shell rm -rf build" in said["two"]


@in_chat
async def test_k13_the_parents_approvals_too(room: Room, pilot: Pilot[Any]) -> None:
    await enter(pilot, "ask first")
    await until_shown(pilot, "the agent asks to call shell", "make clean")
    await pilot.press("y")
    await until_shown(pilot, "the answer is approve", "parent has done it")


@in_chat
async def test_k13_an_approval_that_nobody_waits_for_any_more_is_let_go(
    room: Room, pilot: Pilot[Any]
) -> None:
    await room.fork(one("ask"))
    await until_shown(pilot, "one asks to call shell")
    [branch] = room.session.branches
    await room.session.coordinator.terminate_branch(branch.id)
    await pilot.press("y")
    await until_shown(pilot, "2 ⊘ one")


@in_chat
async def test_k15_a_branch_is_not_forked_from_its_tab(room: Room, pilot: Pilot[Any]) -> None:
    await room.fork(one("write a"))
    await until_shown(pilot, "✓ one")
    await pilot.press("tab")
    await enter(pilot, "/fork")
    await until_shown(pilot, "! /fork has to wait: a fork is open")
    assert len(room.session.branches) == 1
