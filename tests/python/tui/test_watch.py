"""`branching watch` under a pilot: what is seen of calls in other processes, and what keys do."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import NAME_FROM, Mounted
from support.command import Running, branching
from support.screen import piloted, shown, until, until_shown
from textual.pilot import Pilot

from branching import Workspace
from branching.fs import BranchRecord
from branching.fs.branch_leases import drop_orphaned
from branching.patterns import Event
from branching.runlog.run_log import RunLog
from branching.tui.watch import app as watch_module
from branching.tui.watch.app import Watch

WAITS = 'until grep -q go "$BRANCHING_STEER"; do sleep 0.02; done; echo it went'


@pytest.fixture
def space(real: Mounted) -> Iterator[Workspace]:
    with Workspace(real.root) as space:
        yield space
        for record in space.branches():
            if record.parent == 0:
                space.reopen(record.name).abort()


@pytest.fixture
def app(space: Workspace) -> Watch:
    return Watch(space)


def race(root: Path, *candidates: str, options: tuple[str, ...] = ()) -> Running:
    """Starts a race in another process."""
    words = [word for text in candidates for word in ("-c", text)]
    return Running(root, ["speculate", "--quiet", *options, *words])


def test_a_race_in_another_process_is_seen(real: Mounted, app: Watch) -> None:
    call = race(real.root, f"echo hello; echo new > made; {WAITS}", "echo no; exit 3")

    async def act(pilot: Pilot[Any]) -> None:
        await until_shown(
            pilot, "speculate-", "1 running, 1 failed", "● running", "✗ failed", "hello"
        )
        await until_shown(pilot, "1 running", "+1")
        await pilot.press("tab")
        await until_shown(pilot, "echo no; exit 3")
        await until(pilot, lambda: output(app) == "no", "its output")
        await pilot.press("1")
        await until_shown(pilot, "hello")
        await pilot.press("s", *"go", "enter")
        await until_shown(pilot, "it went", "★ won", "1 won, 1 failed")

    piloted(app, act)
    assert call.done().code == 0
    assert (real.base / "made").exists()


def output(app: Watch) -> str:
    from textual.widgets import RichLog

    return "\n".join(strip.text for strip in app.query_one("#output", RichLog).lines)


def test_p_pauses_and_resumes_and_x_stops_after_confirmation(real: Mounted, app: Watch) -> None:
    call = race(real.root, "i=0; while :; do i=$((i+1)); echo $i; sleep 0.02; done")

    async def act(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "● running")
        await pilot.press("p")
        await until_shown(pilot, "‖ paused", "p resume")
        await pilot.press("p")
        await until_shown(pilot, "● running", "is resumed")
        await pilot.press("x")
        await until_shown(pilot, "Stop what runs in")
        await pilot.press("enter")  # no answer
        await until_shown(pilot, "Stop what runs in")
        await pilot.press("escape")
        await until_shown(pilot, "● running")
        await pilot.press("x", "y")
        await until_shown(pilot, "⊘ cancelled")

    piloted(app, act)
    assert call.done().code == 1


def test_a_fork_in_another_process_is_steered_as_a_race_is(real: Mounted, app: Watch) -> None:
    """Output, a pause, a word, a stop; a branch that was kept is there after the merge."""
    labels = ["--label", "one", "--label", "two"]
    begun = f"echo begun; echo $BRANCHING_LABEL > made; {WAITS}"
    call = Running(real.root, ["fork", "--quiet", *labels, "-c", begun, "-c", "sleep 600"])

    async def act(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "fork ", "2 running", "0 one:", "1 two:")
        await pilot.press("2")  # the first is the parent's own, which may be seen alone
        await until_shown(pilot, "one: echo begun", "begun", "+1")
        await pilot.press("p")
        await until_shown(pilot, "1 paused, 1 running", "is paused")
        await pilot.press("p")
        await until_shown(pilot, "2 running", "is resumed")
        await pilot.press("s", *"go", "enter")
        await until_shown(pilot, "it went", "✓ done")
        await pilot.press("tab")
        await until_shown(pilot, "two: sleep 600")
        await pilot.press("k")
        await until_shown(pilot, "is kept when its call ends")
        await pilot.press("x")
        await until_shown(pilot, "Stop what runs in")
        await pilot.press("y")
        await until_shown(pilot, "★ won", "1 open")
        assert call.done().code == 0

    piloted(app, act)
    assert (real.base / "made").read_text() == "one\n"


def test_a_kept_branch_is_committed_and_undone(real: Mounted, app: Watch) -> None:
    call = race(real.root, "echo new > made; echo more >> " + NAME_FROM + "; sleep 600")

    async def act(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "● running", "+1 ~1")
        await pilot.press("c")
        await until_shown(pilot, "it still runs")
        await pilot.press("k")
        await until_shown(pilot, "is kept when its call ends")
        await pilot.press("x", "y")
        await until_shown(pilot, "⊘ cancelled", "1 open")
        assert call.done().code == 1
        await pilot.press("c")
        await until_shown(pilot, "Commit speculate", "A made", f"M {NAME_FROM}")
        assert not (real.base / "made").exists()
        await pilot.press("y")
        await until_shown(pilot, "is committed to /main: 2 paths changed", "1 to undo")
        assert (real.base / "made").exists()
        await pilot.press("u")
        await until_shown(pilot, "Undo the commit of speculate", "D made")
        await pilot.press("y")
        await until_shown(pilot, "is undone")
        assert not (real.base / "made").exists()

    piloted(app, act)


def test_a_drops_a_branch_after_a_question(space: Workspace, app: Watch) -> None:
    kept(space, "mine", {"x": "1"})

    async def act(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "○ open", "mine", "+1", "keeps no log")
        await pilot.press("p")
        await until_shown(pilot, "mine cannot be controlled: the program that created it")
        await pilot.press("k")
        await until_shown(pilot, "mine is open; the program that created it")
        await pilot.press("a", "escape")
        await pilot.press("a", "y")
        await until_shown(pilot, "mine is dropped", "No branch is open")

    piloted(app, act)
    assert space.branches() == []


def kept(space: Workspace, name: str, files: dict[str, str], parent: str | None = None) -> None:
    """Makes a branch that stays open."""
    origin = space if parent is None else space.reopen(parent)
    with origin.branch(name, on_success=None) as branch:
        for path, content in files.items():
            (branch.path / path).write_text(content)


def test_nested_branches_are_a_tree(space: Workspace, app: Watch) -> None:
    kept(space, "outer", {"x": "1"})
    kept(space, "inner", {"y": "1"}, parent="outer")
    kept(space, "innermost", {"z": "1"}, parent="inner")

    async def act(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, " outer", "   inner", "     innermost")
        await pilot.press("3")
        await until_shown(pilot, "/main/outer/inner/innermost")

    piloted(app, act)


def test_side_by_side_with_the_parent_and_with_a_marked_branch(
    real: Mounted, space: Workspace, app: Watch
) -> None:
    lines = [f"line {n}" for n in range(100)]
    (real.base / "text").write_text("\n".join(lines) + "\n")
    edited = [*lines]
    edited[10], edited[90] = "ten", "ninety"
    kept(space, "one", {"text": "\n".join(edited) + "\n", "binary": "\0\1"})
    edited[10] = "TEN"
    kept(space, "two", {"text": "\n".join(edited) + "\n"})

    async def act(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "1 ○ open", "2 ○ open")
        await pilot.press("1", "f")
        await until_shown(pilot, "A binary", "M text  +2 -2")
        await pilot.press("d")
        await until_shown(
            pilot, "main │ one · 2 file(s)", "A binary", "M text", "[binary]", "absent"
        )
        await pilot.press("right")
        await until_shown(pilot, "hunk 1/2", "11 line 10", "~   11 ten")
        await pilot.press("n")
        await until_shown(pilot, "hunk 2/2", "~   91 ninety")
        await pilot.press("c", "a", "x", "enter")  # keys of the screen behind do nothing here
        await pilot.press("escape")
        await until_shown(pilot, "1 ○ open")
        assert "Drop" not in shown(app)
        await pilot.press("m", "2", "d")
        await until_shown(pilot, "one │ two", "binary")
        await pilot.press("right")
        await until_shown(pilot, "11 ten", "~   11 TEN", "hunk 1/1")

    piloted(app, act)


def test_the_keys_of_a_diff_have_room_in_40_columns(space: Workspace, app: Watch) -> None:
    kept(space, "one", {"a": "x\n"})

    async def act(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "○ open")
        await pilot.press("d")
        await until_shown(pilot, "main │ one", "esc back  n p hunks  ← → files")

    piloted(app, act, size=(40, 10))


def test_the_changes_of_a_stale_branch_are_those_of_its_patch(
    real: Mounted, space: Workspace, app: Watch
) -> None:
    kept(space, "mine", {"a": "work\n"})
    kept(space, "other", {"b": "x\n"})
    space.reopen("other").commit()

    async def act(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "⊘ stale")
        await pilot.press("1", "f")
        await until_shown(pilot, "A a  +1 -0")
        await pilot.press("d")
        await until_shown(pilot, "before │ mine", "A a", "1 work")

    piloted(app, act)


def test_code_side_by_side_has_the_colours_of_its_language(
    real: Mounted, space: Workspace, app: Watch
) -> None:
    kept(space, "one", {"code.py": "return 'text'\n"})

    def colour_of(word: str) -> object:
        strips = app.screen._compositor.render_strips()
        [line] = [strip for strip in strips if "return" in strip.text]
        style = next(segment.style for segment in line if word in segment.text)
        assert style is not None
        return style.color

    async def act(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "1 ○ open")
        await pilot.press("1", "d")
        await until_shown(pilot, "+    1 return 'text'")
        assert len({str(colour_of(word)) for word in ("+", "return", "text")}) == 3

    piloted(app, act)


def test_a_conflict_lists_the_paths_and_can_be_forced(
    real: Mounted, space: Workspace, app: Watch
) -> None:
    kept(space, "mine", {NAME_FROM: "mine\n"})
    (real.base / NAME_FROM).write_text("theirs, and longer\n")

    async def act(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "○ open", "~1")
        await pilot.press("c")
        await until_shown(pilot, "The same paths were changed", NAME_FROM, "[f] force", "[s] skip")
        await pilot.press("f")
        await until_shown(pilot, "is committed")

    piloted(app, act)
    assert (real.base / NAME_FROM).read_text() == "mine\n"


def test_a_call_whose_program_was_killed_is_lost(real: Mounted, app: Watch) -> None:
    call = race(real.root, "sleep 600")

    async def act(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "● running")
        call.process.kill()
        call.done()
        await until_shown(pilot, "? lost", "its program was killed")
        await pilot.press("p")
        await until_shown(pilot, "nothing runs in", "lost")

    piloted(app, act)
    listed = branching(real.root, "ls")
    [line] = listed.out.splitlines()
    said = (
        "open branches whose command did not record its end (it was killed, or the disk was full)"
    )
    assert f"{said}: {line.split()[0]}" in listed.err


def test_branches_left_by_a_killed_tool_server_are_shown_and_can_be_kept(
    space: Workspace, app: Watch
) -> None:
    for name in ("mine", "others"):
        kept(space, name, {"x": "1"})
    left_behind(space, "mine", "others")

    async def act(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "1 ? lost", "2 ? lost", "its MCP server was killed", "k keep")
        await pilot.press("1", "k")
        await until_shown(pilot, "1 ○ open", "2 ? lost", "mine is open, and stays so")

    piloted(app, act)
    assert [record.name for record in drop_orphaned(space)] == ["others"]


def left_behind(space: Workspace, *names: str) -> None:
    """Claims branches in a process that is killed then."""
    script = (
        "import os, signal, sys; from branching import Workspace;"
        "from branching.fs.branch_leases import BranchLeases;"
        "space = Workspace(sys.argv[1]); claims = BranchLeases(space);"
        "[claims.add(each) for each in space.branches() if each.name in sys.argv[2:]];"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    argv = [sys.executable, "-c", script, str(space.root), *names]
    assert subprocess.run(argv, check=False).returncode == -signal.SIGKILL


def test_output_and_file_names_cannot_control_the_screen(real: Mounted, app: Watch) -> None:
    evil = r"\033[2J\033]0;title\007\033[31mred\033[0m \033[10;10Hhere\rlast"
    call = race(real.root, f"printf '{evil}\\n'; touch \"$(printf 'a\\033[2Jb')\"; {WAITS}")

    async def act(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "● running", "last")
        assert "title" not in output(app)
        assert "\x1b" not in shown(app)
        await until_shown(pilot, "+1")
        await pilot.press("f")
        await until_shown(pilot, "A ab")
        await pilot.press("x", "y")
        await until_shown(pilot, "cancelled")

    piloted(app, act)
    call.done()


class Stuck:
    """A workspace whose daemon has stopped answering."""

    def __init__(self, space: Workspace) -> None:
        self._space = space
        self.is_asked = threading.Event()
        self.goes_on = threading.Event()

    def branches(self) -> list[BranchRecord]:
        self.is_asked.set()
        self.goes_on.wait()
        return []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._space, name)


def test_a_daemon_that_does_not_answer_holds_up_neither_the_keys_nor_the_leaving(
    space: Workspace,
) -> None:
    stuck: Any = Stuck(space)
    app = Watch(stuck)

    async def act(pilot: Pilot[Any]) -> None:
        await until(pilot, stuck.is_asked.is_set, "the daemon is asked")
        await pilot.press("question_mark")
        await until_shown(pilot, "Keys", "side by side")
        await pilot.press("escape", "d")
        await until_shown(pilot, "no branch is chosen")
        await pilot.press("q")

    try:
        piloted(app, act)
    finally:
        stuck.goes_on.set()


def test_an_error_that_hides_the_branches_is_shown(space: Workspace, app: Watch) -> None:
    def refuse() -> list[BranchRecord]:
        raise OSError("the mount is gone")

    kept(space, "mine", {"x": "1"})

    async def act(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "○ open", "mine")
        space.branches = refuse  # type: ignore[method-assign]
        await until_shown(pilot, "the branches cannot be read: the mount is gone", "○ open")
        del space.branches

    piloted(app, act)


def row_of(app: Watch, text: str) -> str:
    """Returns the first line of the screen that has the text."""
    return next((line for line in shown(app).splitlines() if text in line), "")


def test_candidates_stand_together_with_their_last_lines(real: Mounted, app: Watch) -> None:
    """They are sorted by number, also those that have ended, below the name of their call."""
    call = race(real.root, f"echo first; {WAITS}", "echo second; exit 1", f"echo third; {WAITS}")

    async def act(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "2 running, 1 failed")
        await until_shown(pilot, "first", "second", "third")
        lines = [line.strip() for line in shown(app).splitlines()]
        start = next(n for n, line in enumerate(lines) if line.startswith("speculate-"))
        rows = lines[start + 1 : start + 4]
        assert [row[:1] for row in rows] == ["1", "2", "3"]
        assert [row.split()[-1] for row in rows] == ["first", "second", "third"]
        await pilot.press("1", "s", *"go", "enter")
        await until_shown(pilot, "1 won, 1 failed, 1 cancelled")

    piloted(app, act)
    assert call.done().code == 0


@pytest.mark.parametrize("size", [(40, 10), (60, 16), (80, 24), (200, 50)])
def test_nothing_is_cut_at_any_size(real: Mounted, app: Watch, size: tuple[int, int]) -> None:
    call = race(real.root, "echo new >made; for i in 1 2 3; do echo line $i; done; sleep 600")

    async def act(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "1 ● running", "+1", "line 3", "? keys", "q quit")
        await pilot.press("m")
        await until_shown(pilot, "is marked")
        for line in shown(app).splitlines()[-2:]:
            assert len(line) <= size[0]
        await pilot.press("x")
        await until_shown(pilot, "[y] stop it", "[escape] back")
        await pilot.press("y")
        await until_shown(pilot, "1*⊘ cancelled", "? keys", "q quit")

    piloted(app, act, size=size)
    call.done()


def test_the_chosen_row_has_the_two_colours_of_the_terminal_alone(
    space: Workspace, app: Watch
) -> None:
    """Its contrast is then that of the terminal's default text."""
    kept(space, "one", {"x": "1"})
    kept(space, "two", {"x": "1"})

    async def act(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "1 ○ open", "2 ○ open")
        await pilot.press("2")
        await pilot.pause()
        strips = app.screen._compositor.render_strips()
        [chosen] = [strip for strip in strips if "2 ○ open" in strip.text]
        segments = [segment for segment in chosen if segment.text.strip()]
        assert segments
        for segment in segments:
            assert segment.style is not None
            assert segment.style.reverse
            for colour in (segment.style.color, segment.style.bgcolor):
                assert colour is None or colour.is_default, segment

    piloted(app, act)


def test_a_commit_names_the_stale_branches_and_the_committed_one_has_won(
    real: Mounted, app: Watch, space: Workspace
) -> None:
    call = race(real.root, "echo new >made; sleep 600")
    kept(space, "other", {"x": "1"})

    async def act(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "● running", "+1", "other")
        await pilot.press(row_of(app, "● running").strip()[0])
        await pilot.press("k")
        await until_shown(pilot, "is kept when its call ends")
        await pilot.press("x", "y")
        await until_shown(pilot, "⊘ cancelled")
        call.done()
        await pilot.press("c")
        await until_shown(pilot, "Afterwards these are stale until they are rebased (r): other")
        await pilot.press("y")
        await until_shown(pilot, "★ won", "⊘ stale")
        await pilot.press(row_of(app, "⊘ stale").strip()[0])
        await until_shown(pilot, "r rebase")
        await pilot.press("r")
        await until_shown(pilot, "other is rebased", "○ open")

    piloted(app, act)


def test_the_changes_of_a_dropped_branch_are_short(real: Mounted, app: Watch) -> None:
    race(real.root, f"rm {NAME_FROM}; echo new >made; exit 1").done()

    async def act(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "✗ failed", "+1 -1")
        assert "added" not in shown(app)

    piloted(app, act)


def test_a_message_goes_after_a_while(
    space: Workspace, app: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "SAID_SECONDS", 3.0)
    kept(space, "mine", {"x": "1"})

    async def act(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "○ open")
        await pilot.press("m")
        await until_shown(pilot, "mine is marked")
        await until(pilot, lambda: "is marked" not in shown(app), "the message is gone")

    piloted(app, act)


def test_the_files_of_a_dropped_branch_are_those_of_its_patch(real: Mounted, app: Watch) -> None:
    """Also of a candidate that was cancelled, whose changes nothing else has counted."""
    slow = f"echo mine > {NAME_FROM}; touch ready; sleep 600"
    call = race(real.root, slow, WAITS)

    async def act(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "+1 ~1")
        await pilot.press("2", "s", *"go", "enter")
        await until_shown(pilot, "★ won", "⊘ cancelled")
        await until(pilot, lambda: "+1 ~1" in row_of(app, "⊘ cancelled"), "its changes")
        await pilot.press("2")
        await until(pilot, lambda: "f files" not in shown(app), "no key for files: it has none")
        await pilot.press("1")
        await until_shown(pilot, "f files")
        await pilot.press("f")
        await until_shown(pilot, f"M {NAME_FROM}  +1 -", "A ready")
        await pilot.press("down", "enter")
        await until_shown(pilot, "before │ speculate-", "mine")

    piloted(app, act)
    assert call.done().code == 0


def test_the_name_of_a_call_and_its_states_are_on_one_line(real: Mounted, app: Watch) -> None:
    call = race(real.root, "exit 1", "sleep 600", f"echo x > made; {WAITS}")

    async def act(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "1 failed, 2 running")
        await pilot.press("3", "s", *"go", "enter")
        await until_shown(pilot, "★ won", "⊘ cancelled")
        table = [line for line in shown(app).splitlines() if line][1:5]
        assert table[0] == "speculate: 1 failed, 1 cancelled, 1 won", table
        assert [line[:1] for line in table[1:]] == ["1", "2", "3"]

    piloted(app, act, size=(40, 16))
    assert call.done().code == 0


def test_a_question_shows_its_keys_at_any_size(space: Workspace, app: Watch) -> None:
    kept(space, "mine", {f"f{n}": "1" for n in range(30)})

    async def act(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "○ open")
        for key, words in (("?", ("Keys",)), ("c", ("A f0", "[y] commit"))):
            await pilot.press("question_mark" if key == "?" else key)
            await until_shown(pilot, *words, "[escape] back")
            await pilot.press("escape")

    piloted(app, act, size=(40, 10))


def test_losers_and_the_winner_can_be_compared_after_the_race(real: Mounted, app: Watch) -> None:
    done = race(real.root, f"echo mine > {NAME_FROM}; exit 1", "echo x > made; sleep 0.3").done()
    assert done.code == 0

    async def act(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "1 won", "1 failed")
        await pilot.press(row_of(app, "✗ failed").strip()[0])
        await until_shown(pilot, "d diff")
        await pilot.press("d")
        await until_shown(pilot, "before │ speculate-", f"M {NAME_FROM}", "1 mine", "hunk 1/1")
        await pilot.press("escape")
        await pilot.press(row_of(app, "★ won").strip()[0], "d")
        await until_shown(pilot, "A made", "1 x")

    piloted(app, act)


def test_watch_shows_the_node_of_a_remote_attempt(space: Workspace, app: Watch) -> None:
    """The log has it, from which other programs learn what a runner on a cluster says."""
    with RunLog.of(space, "best-of-n") as log, space.branch("remote", on_success=None) as branch:
        on_event = log.and_then(lambda _: None)
        on_event(Event(kind="started", index=0, branch=branch.name, label="make"))
        on_event(Event(kind="placed", index=0, branch=branch.name, node="worker-7/a1"))

        async def act(pilot: Pilot[Any]) -> None:
            await until_shown(pilot, "on node worker-7/a1")

        piloted(app, act)
