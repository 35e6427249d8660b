"""`branching chat` under a pilot, item by item of its contract (K1 to K15)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Mounted
from support.screen import piloted, shown, until, until_shown
from textual.pilot import Pilot
from textual.widgets import Input

from branching import BranchError, Workspace
from branching.agent.types import BranchSpec
from branching.editors import EditorDetector
from branching.patterns.door import ask
from branching.patterns.logbook import Entry, read_entries
from branching.tui import chat as chat_module
from branching.tui.chat import Chat
from branching.tui.chatting.session import ChatSession

from .chatter import Script, ScriptedJudge, new_session

Act = Callable[[Pilot[Any]], Coroutine[Any, Any, None]]


class Room:
    """A chat that a test acts in."""

    def __init__(self, space: Workspace, settings: Path) -> None:
        self.space = space
        self.settings = settings
        self.script = Script()
        self.judge = ScriptedJudge()
        self.session: ChatSession

    def run(self, act: Act) -> None:
        """Opens the chat, acts in it, and closes it."""
        self.session = new_session(self.space, self.settings, self.script, self.judge)
        app = Chat(self.session)

        async def whole(pilot: Pilot[Any]) -> None:
            try:
                await act(pilot)
            finally:
                await self.session.close()

        piloted(app, whole)

    async def fork(self, *specs: BranchSpec) -> None:
        assert await self.session.fork(specs)


@pytest.fixture
def room(real: Mounted, place: Path) -> Iterator[Room]:
    with Workspace(real.root) as space:
        yield Room(space, place / "settings" / "chat.json")
        assert space.branches() == []


async def enter(pilot: Pilot[Any], text: str) -> None:
    """Types a line into the prompt, as pasting it does."""
    prompt = pilot.app.screen.query_one("#prompt", Input)
    prompt.value = text
    await pilot.press("enter")


def one(steer: str = "wait", **options: Any) -> BranchSpec:
    return BranchSpec("one", steer, **options)


def two(steer: str = "wait", **options: Any) -> BranchSpec:
    return BranchSpec("two", steer, **options)


def test_k1_the_picker_has_rows_with_model_and_budget_and_one_for_all(room: Room) -> None:
    async def act(pilot: Pilot[Any]) -> None:
        await enter(pilot, "/fork-branches 2")
        await enter(pilot, "/fork")
        await until_shown(pilot, "Fork: label", "1  label", "2  label", "all together")
        await pilot.press("enter")
        await until_shown(pilot, "no branch has a label")

        async def fill(name: str, value: str) -> None:
            pilot.app.screen.query_one(f"#{name}-1", Input).value = value
            await pilot.press("enter")

        await fill("label", "one")
        await until_shown(pilot, "'one' needs a label and what it is told")
        pilot.app.screen.query_one("#told-1", Input).value = "wait"
        await fill("model", "nobody")
        await until_shown(pilot, "does not say whose model")
        pilot.app.screen.query_one("#usd-1", Input).value = "0.5"
        await fill("model", "nobody:m")
        await until_shown(pilot, "Forked: one", "● one", "$0.02 of $0.50")
        assert room.script.models == {"one": "nobody:m"}

    room.run(act)


def test_k1_nothing_is_forked_while_a_run_is_in_flight_or_a_fork_is_open(room: Room) -> None:
    async def act(pilot: Pilot[Any]) -> None:
        await enter(pilot, "please wait")
        await until(pilot, lambda: room.session.is_in_flight, "a run is in flight")
        await enter(pilot, "/fork")
        await until_shown(pilot, "! a run is in flight; nothing is forked")
        await enter(pilot, "and more")
        await until_shown(pilot, "! a run is in flight; Escape stops it")
        room.script.goes_on.add("parent")
        await until_shown(pilot, "parent has done it")
        await until(pilot, lambda: not room.session.is_in_flight, "the run has ended")
        await room.fork(one())
        await enter(pilot, "/fork")
        await until_shown(pilot, "! /fork has to wait: a fork is open")

    room.run(act)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/fork-branches", "a fork has up to 10 branches"),
        ("/fork-branches 3", "a fork has up to 3 branches"),
        ("/fork-branches 0", "! a fork has 1 to 10 branches, not 0"),
        ("/fork-branches 11", "! a fork has 1 to 10 branches, not 11"),
        ("/fork-branches x", "! write /fork-branches N"),
        ("/fork-budget", "budget of a branch: none; of all together: none"),
        ("/fork-budget per-branch 0.5", "budget of a branch: $0.50; of all together: none"),
        ("/fork-budget aggregate $2", "budget of a branch: none; of all together: $2.00"),
        ("/fork-budget aggregate -1", "! a budget is more than $0"),
        ("/fork-budget aggregate nan", "! a budget is more than $0"),
        ("/fork-budget both 1", "! write /fork-budget"),
        ("/fork-budget clear", "no budgets"),
        ("/fork-model 1 openai:gpt", "models of branches: 1: openai:gpt"),
        ("/fork-model 1 gpt", "! 'gpt' does not say whose model it is"),
        ("/fork-model 0 openai:gpt", "! write /fork-model"),
        ("/fork-model 1 clear", "models of branches: that of the chat"),
        ("/fork-model clear", "every branch has the model of the chat"),
        ("/fork-strategy vote", "the winner is chosen: vote"),
        ("/fork-strategy best", "! write /fork-strategy and one of manual, auto"),
        ("/nonsense", "! /nonsense is no command"),
        (">>nobody hello", "! no branch is called 'nobody'; there are: none"),
        ("/merge", "! there is no fork to be merged"),
        ("/fork diff", "! there is no fork to be compared"),
        ("/cost", "nothing was forked yet"),
        ("/version", "branching 0."),
        ("/help", "/fork-budget per-branch|aggregate"),
        ("/copy", "! there is nothing to be copied"),
    ],
)
def test_k2_k3_k4_k10_commands_answer(room: Room, line: str, said: str) -> None:
    async def act(pilot: Pilot[Any]) -> None:
        await enter(pilot, line)
        await until_shown(pilot, said)

    room.run(act)


def test_k2_k3_k4_what_is_settled_is_remembered_and_used(room: Room) -> None:
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

    room.run(settle)
    room.run(use)
    assert json.loads(room.settings.read_text())["branches"] == 2


def test_k2_a_damaged_file_of_settings_is_told_and_left_out(room: Room) -> None:
    room.settings.parent.mkdir()
    room.settings.write_text('{"branches": 99}')

    async def act(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "cannot be used", "these are the defaults")
        assert room.session.settings.branches == 10

    room.run(act)


def test_k5_fork_diff_shows_touched_paths_times_branches(room: Room) -> None:
    async def act(pilot: Pilot[Any]) -> None:
        await room.fork(one("write seed.txt"), two("write seed.txt"), BranchSpec("x", "write own"))
        await until_shown(pilot, "✓ one", "✓ two", "✓ x")
        await enter(pilot, "/fork diff")
        await until_shown(
            pilot, "3 file(s)", "M seed.txt · one (split)", "M seed.txt · two (split)"
        )
        await until_shown(pilot, "A own · x (unique)", "+    1 x", "hunk 1/1")
        await pilot.press("right")
        await until_shown(pilot, "1 seed", "~    1 one")
        await pilot.press("right")
        await until_shown(pilot, "~    1 two")
        await pilot.press("escape")
        await enter(pilot, "/fork diff own")
        await until_shown(pilot, "1 file(s)", "A own · x", "+    1 x")
        await pilot.press("escape")

    room.run(act)


def test_k6_k14_the_picker_merges_by_number_and_the_conversation_goes_on(room: Room) -> None:
    async def act(pilot: Pilot[Any]) -> None:
        await enter(pilot, "/fork-strategy manual")
        await enter(pilot, "first")
        await until_shown(pilot, "parent has done it")
        await until(pilot, lambda: not room.session.is_in_flight, "the run has ended")
        await room.fork(one("write a"), two("write b"))
        await until_shown(pilot, "✓ one", "✓ two")
        await enter(pilot, "/merge")
        await until_shown(pilot, "which branch wins?", "1 ✓ one: done · 2 turns", "2 ✓ two")
        await pilot.press("2")
        await until_shown(pilot, "Merged: kept branch two", "1 files applied: b")
        assert (room.space.base / "b").read_text() == "two\n" * 3
        assert not (room.space.base / "a").exists()
        said = [message["content"] for message in room.session.history]
        assert said == ["first", "parent did: first", "write b", "two did: write b"]
        assert room.session.badge == ""
        assert room.judge.asked == 0

    room.run(act)


def test_k6_o_opens_the_editor_and_comes_back(
    room: Room, monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    monkeypatch.setenv("BRANCHING_DIFFTOOL", f"echo {{parent}} {{branches}} >'{place}/opened' #")

    async def act(pilot: Pilot[Any]) -> None:
        await enter(pilot, "/fork-strategy manual")
        await room.fork(one("write a"))
        await until_shown(pilot, "✓ one")
        await enter(pilot, "/merge")
        await until_shown(pilot, "which branch wins?")
        await pilot.press("o")
        opened = place / "opened"
        await until(pilot, lambda: opened.exists() and opened.read_text(), "the editor was called")
        [branch] = room.session.branches
        assert str(branch.path) in opened.read_text()
        await until_shown(pilot, "which branch wins?")
        await pilot.press("escape")

    room.run(act)


def test_k6_without_an_editor_o_shows_the_differences(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BRANCHING_DIFFTOOL", "PYDANTIC_DEEP_DIFFTOOL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(EditorDetector, "detect", staticmethod(lambda: "tui"))

    async def act(pilot: Pilot[Any]) -> None:
        await enter(pilot, "/fork-strategy manual")
        await room.fork(one("write a"))
        await until_shown(pilot, "✓ one")
        await enter(pilot, "/merge")
        await until_shown(pilot, "which branch wins?")
        await pilot.press("o")
        await until_shown(pilot, "A a · one")
        await pilot.press("escape")
        await until_shown(pilot, "which branch wins?")
        await pilot.press("enter")
        await until_shown(pilot, "Merged: kept branch one")

    room.run(act)


@pytest.mark.parametrize("kind", ["auto", "vote"])
def test_k6_auto_merges_by_itself_and_can_be_overridden(room: Room, kind: str) -> None:
    async def act(pilot: Pilot[Any]) -> None:
        await enter(pilot, f"/fork-strategy {kind}")
        await room.fork(one("write a"), two("write b"))
        await until_shown(pilot, "✓ one", "✓ two")
        await enter(pilot, "/merge")
        await until_shown(pilot, "Merged: kept branch one", "/override LABEL")
        await enter(pilot, "/override two")
        await until_shown(pilot, "Merged: kept branch two")
        assert not (room.space.base / "a").exists()
        assert (room.space.base / "b").exists()

    room.run(act)


def test_k7_what_the_judge_is_sure_of_is_accepted_after_a_look(room: Room) -> None:
    async def act(pilot: Pilot[Any]) -> None:
        await room.fork(one("write a"), two("write b"))
        await until_shown(pilot, "✓ one", "✓ two")
        await enter(pilot, "/merge")
        await until_shown(pilot, "The judge chose one", "0.90 sure: one is best")
        await pilot.press("d")
        await until_shown(pilot, "A a · one", "A b · two")
        await pilot.press("escape")
        await until_shown(pilot, "The judge chose one")
        await pilot.press("escape")
        assert room.session.is_forked
        await enter(pilot, "/merge")
        await until_shown(pilot, "The judge chose one")
        assert room.judge.asked == 1, "G15: the same question is not asked twice"
        await pilot.press("enter")
        await until_shown(pilot, "Merged: kept branch one")

    room.run(act)


def test_k7_o_overrides_with_the_picker_which_has_the_choice_and_the_reason(room: Room) -> None:
    room.judge.label = "two"

    async def act(pilot: Pilot[Any]) -> None:
        await room.fork(one("write a"), two("write b"))
        await until_shown(pilot, "✓ one", "✓ two")
        await enter(pilot, "/merge")
        await until_shown(pilot, "The judge chose two")
        await pilot.press("o")
        await until_shown(pilot, "which branch wins?", "two is best")
        await pilot.press("up", "enter")  # two is chosen already; one is above it
        await until_shown(pilot, "Merged: kept branch one")

    room.run(act)


def test_g3_below_the_threshold_the_picker_asks(room: Room) -> None:
    room.judge.label, room.judge.confidence = "two", 0.3

    async def act(pilot: Pilot[Any]) -> None:
        await room.fork(one("write a"), two("write b"))
        await until_shown(pilot, "✓ one", "✓ two")
        await enter(pilot, "/merge")
        await until_shown(pilot, "which branch wins?", "0.30 sure: two is best")
        await pilot.press("enter")
        await until_shown(pilot, "Merged: kept branch two")

    room.run(act)


def test_a_judge_that_fails_leaves_the_choice_to_the_person(room: Room) -> None:
    room.judge.label = "nobody"

    async def act(pilot: Pilot[Any]) -> None:
        await room.fork(one("write a"))
        await until_shown(pilot, "✓ one")
        await enter(pilot, "/merge")
        await until_shown(pilot, "which branch wins?", "no judgement")
        await pilot.press("1")
        await until_shown(pilot, "Merged: kept branch one")

    room.run(act)


def test_k8_tabs_have_marks_tab_goes_around_and_the_badge_counts(room: Room) -> None:
    async def act(pilot: Pilot[Any]) -> None:
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

    room.run(act)


def test_k8_an_exhausted_fork_is_marked(room: Room) -> None:
    async def act(pilot: Pilot[Any]) -> None:
        assert await room.session.fork([one("wait"), two("wait")], aggregate_usd=0.03)
        await until_shown(pilot, "$$ ", "agg-exhausted")

    room.run(act)


def test_k9_a_word_goes_to_its_branch_alone_or_nowhere(room: Room) -> None:
    async def act(pilot: Pilot[Any]) -> None:
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

    room.run(act)


def test_k9_an_exclamation_mark_is_the_shell_where_the_tab_works(room: Room) -> None:
    async def act(pilot: Pilot[Any]) -> None:
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

    room.run(act)


def test_k10_while_a_fork_is_open_only_these_are_allowed(room: Room) -> None:
    async def act(pilot: Pilot[Any]) -> None:
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

    room.run(act)


def test_k10_a_finished_branch_goes_on_with_what_is_typed_on_its_tab(room: Room) -> None:
    async def act(pilot: Pilot[Any]) -> None:
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
        assert len(room.session.history) == 4

    room.run(act)


def test_k11_what_is_said_is_seen_piece_by_piece(room: Room) -> None:
    async def act(pilot: Pilot[Any]) -> None:
        await room.fork(one())
        [branch] = room.session.branches
        await pilot.press("tab")
        await until_shown(pilot, "one hears wait")
        for piece, seen in (("half a ", "half a"), ("line", "half a line"), ("\nnext", "next")):
            room.session.heard(branch.id, piece)
            await until_shown(pilot, seen)
        assert chat_module.STATES_SECONDS == 0.5

    room.run(act)


def test_k12_escape_terminates_a_branch_or_aborts_all_after_a_question(room: Room) -> None:
    async def act(pilot: Pilot[Any]) -> None:
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

    room.run(act)


def test_escape_stops_the_parents_run(room: Room) -> None:
    async def act(pilot: Pilot[Any]) -> None:
        await enter(pilot, "please wait")
        await until_shown(pilot, "parent hears please wait")
        await pilot.press("escape")
        await until_shown(pilot, "Stop the run?")
        await pilot.press("y")
        await until_shown(pilot, "· stopped")
        assert room.session.history == []

    room.run(act)


def test_k13_approvals_come_to_the_front_and_are_answered(room: Room) -> None:
    async def act(pilot: Pilot[Any]) -> None:
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

    room.run(act)


def test_k13_the_parents_approvals_too(room: Room) -> None:
    async def act(pilot: Pilot[Any]) -> None:
        await enter(pilot, "ask first")
        await until_shown(pilot, "the agent asks to call shell", "make clean")
        await pilot.press("y")
        await until_shown(pilot, "the answer is approve", "parent has done it")

    room.run(act)


def test_k13_an_approval_that_nobody_waits_for_any_more_is_let_go(room: Room) -> None:
    async def act(pilot: Pilot[Any]) -> None:
        await room.fork(one("ask"))
        await until_shown(pilot, "one asks to call shell")
        [branch] = room.session.branches
        await room.session.coordinator.terminate_branch(branch.id)
        await pilot.press("y")
        await until_shown(pilot, "2 ⊘ one")

    room.run(act)


def test_k15_a_branch_is_not_forked_from_its_tab(room: Room) -> None:
    async def act(pilot: Pilot[Any]) -> None:
        await room.fork(one("write a"))
        await until_shown(pilot, "✓ one")
        await pilot.press("tab")
        await enter(pilot, "/fork")
        await until_shown(pilot, "! /fork has to wait: a fork is open")
        assert len(room.session.branches) == 1

    room.run(act)


def test_a_fork_that_cannot_be_made_says_why(room: Room) -> None:
    async def act(pilot: Pilot[Any]) -> None:
        assert not await room.session.fork([one(), one()])
        await until_shown(pilot, "! nothing was forked")
        assert not room.session.is_forked

    room.run(act)


def test_a_failed_run_says_why_and_the_conversation_stays(room: Room) -> None:
    async def act(pilot: Pilot[Any]) -> None:
        await enter(pilot, "fail please")
        await until_shown(pilot, "! the run failed: parent was told to fail")
        assert room.session.history == []

    room.run(act)


def test_what_agents_say_cannot_touch_the_screen(room: Room) -> None:
    async def act(pilot: Pilot[Any]) -> None:
        await enter(pilot, "say \x1b[2J\x1b]0;t\x07 this")
        await until_shown(pilot, "parent has done it")
        assert "\x1b" not in shown(pilot.app)

    room.run(act)


def test_to_quit_with_an_open_fork_asks_and_leaves_nothing(room: Room) -> None:
    async def act(pilot: Pilot[Any]) -> None:
        await room.fork(one())
        await enter(pilot, "/quit")
        await until_shown(pilot, "A fork is open. What runs in it is stopped.")
        await pilot.press("escape")
        await until_shown(pilot, "2 ● one")
        await enter(pilot, "/quit")
        await until_shown(pilot, "A fork is open")
        await pilot.press("y")
        await until(pilot, lambda: not pilot.app.is_running, "it has ended")

    room.run(act)
    assert room.space.branches() == []


def test_a_line_typed_ahead_is_the_next_line(room: Room) -> None:
    async def act(pilot: Pilot[Any]) -> None:
        prompt = pilot.app.screen.query_one("#prompt", Input)
        prompt.value = "first"
        await prompt.action_submit()
        prompt.insert_text_at_cursor("next")
        await until_shown(pilot, "parent hears first")
        assert prompt.value == "next"

    room.run(act)


def test_a_fork_is_seen_and_steered_from_another_process(room: Room) -> None:
    """What `branching watch` goes by: entries with cost, state and output, and their door."""
    logs = room.space.base / ".branching" / "logs"

    def entries() -> dict[str, Entry]:
        return {entry.label.split(":")[0]: entry for entry in read_entries(logs)}

    async def act(pilot: Pilot[Any]) -> None:
        await room.fork(one(), two("write b"))
        await until(pilot, lambda: len(entries()) == 2, "both are known")
        await until(pilot, lambda: entries()["two"].state == "done", "the second is done")
        first = entries()["one"]
        assert (first.command, first.state, first.cost_usd) == ("chat", "running", 0.02)
        assert first.branch in {record.name for record in room.space.branches()}
        door = logs / first.door
        runner = room.session.branches[0].runner
        await asyncio.to_thread(ask, door, "pause", first.branch)
        await until(pilot, lambda: entries()["one"].state == "paused", "it is paused")
        await until_shown(pilot, "paused")
        assert room.session.branches[0].pause.is_on
        await asyncio.to_thread(ask, door, "resume", first.branch)
        await until(pilot, lambda: entries()["one"].state == "running", "it goes on")
        room.session.branches[0].runner = None
        with pytest.raises(BranchError, match="cannot be paused"):
            await asyncio.to_thread(ask, door, "pause", first.branch)
        room.session.branches[0].runner = runner
        await asyncio.to_thread(ask, door, "tell", first.branch, "try the cache")
        assert room.script.steered == [("one", "try the cache")]
        await asyncio.to_thread(ask, door, "stop", first.branch)
        await until(pilot, lambda: entries()["one"].state == "terminated", "it is stopped")
        assert "one hears wait" in (logs / f"{first.branch}.log").read_text()
        assert await room.session.pick(room.session.branches[1].id)
        await until(pilot, lambda: entries()["two"].state == "won", "the second has won")

    room.run(act)
