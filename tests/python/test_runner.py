"""The one runner under all patterns: events, cancelling, nesting, failures of its surroundings."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from conftest import Mounted
from support.fake import Refusal
from support.traces import processes_in

from branching import (
    AbortError,
    BestOfN,
    BranchingError,
    CommitError,
    ConflictError,
    ForkError,
    MountError,
    Reflexion,
    Speculate,
    SpeculationOutcome,
    Workspace,
)
from branching._cancellation import CancelScope
from branching.fs import Branch, Change
from branching.patterns import Event
from branching.patterns.attempt import Attempt
from branching.patterns.command_candidate import (
    FEEDBACK_BYTES_MAX,
    BlockSplitter,
    LineSplitter,
    Program,
    Reader,
    shell,
)
from branching.patterns.event_dispatch import EventDispatcher
from branching.runlog.events import taking_blocks


def program(workspace: Workspace, text: str, *, score: bool = False) -> Program:
    return Program(shell(text), workspace=workspace.path, owner=None, score=score)


def test_events_tell_the_whole_story_in_order(workspace: Workspace) -> None:
    events: list[Event] = []
    candidate = program(workspace, "echo one; echo two; echo 0.5 >&3", score=True)
    BestOfN([candidate], on_event=events.append)(workspace)
    assert [(event.kind, event.text, event.state, event.score) for event in events] == [
        ("started", "", "", None),
        ("output", "one", "", None),
        ("output", "two", "", None),
        ("finished", "", "succeeded", None),
        ("scored", "", "succeeded", 0.5),
        ("committed", "", "won", None),
    ]
    assert {event.branch for event in events} == {events[0].branch}


def test_a_loser_is_not_compared_with_its_parent(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The winner would wait for it. A failure before there was a winner is compared."""
    compared: list[str] = []
    diff = Branch.diff

    def noted(branch: Branch) -> list[Change]:
        compared.append(branch.name.rpartition("-")[2])
        return diff(branch)

    monkeypatch.setattr(Branch, "diff", noted)
    failed = threading.Event()

    def winner(_: Path) -> bool:
        return failed.wait(60)

    def on_event(event: Event) -> None:
        if event.state == "failed":
            failed.set()

    losers = [program(workspace, "exit 3"), program(workspace, "sleep 300")]
    outcome = Speculate([*losers, winner], on_event=on_event)(workspace)
    assert [result.state for result in outcome.all_results] == ["failed", "cancelled", "won"]
    assert compared == ["0"]


def test_a_listener_that_raises_ends_the_call(workspace: Workspace) -> None:
    def listen(event: Event) -> None:
        if event.kind == "output":
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        Speculate([program(workspace, "echo x; sleep 300")], on_event=listen)(workspace)


@pytest.mark.contract("4.12")
def test_commands_that_lose_are_killed_before_the_call_returns(real_workspace: Workspace) -> None:
    """No process is left (checked by the fixture). benchmarks/latency.py measures how fast."""
    stubborn = program(real_workspace, "trap '' TERM; sleep 300 & sleep 300; sleep 300")
    winner = program(real_workspace, "sleep 0.2; echo x > won")
    started = time.monotonic()
    outcome = Speculate([stubborn, winner, stubborn, stubborn])(real_workspace)
    assert time.monotonic() - started < 60
    assert outcome.winner is outcome.all_results[1]
    assert [result.state for result in outcome.all_results].count("cancelled") == 3


def test_cancelling_ends_a_call_from_another_thread(workspace: Workspace) -> None:
    scope = CancelScope()
    outcomes: list[SpeculationOutcome] = []
    started = threading.Event()
    pattern = Speculate([program(workspace, "sleep 300")], on_event=lambda _: started.set())
    thread = threading.Thread(target=lambda: outcomes.append(scope.run(pattern, workspace)))
    thread.start()
    assert started.wait(60)
    scope.cancel(1.0)
    thread.join(60)
    assert not outcomes[0].committed
    assert [result.state for result in outcomes[0].all_results] == ["cancelled"]


@pytest.mark.parametrize(
    "pattern",
    [Speculate([lambda path: True]), BestOfN([lambda path: True]), Reflexion(lambda *_: True)],
    ids=lambda pattern: pattern.label,
)
def test_a_call_cancelled_beforehand_commits_nothing(
    workspace: Workspace, pattern: Callable[[Workspace], SpeculationOutcome]
) -> None:
    scope = CancelScope()
    scope.cancel()
    assert not scope.run(pattern, workspace).committed


def test_a_pattern_inside_a_candidate_is_stopped_with_it(workspace: Workspace) -> None:
    """The inner command is killed when the outer race is over."""
    said: list[str] = []

    def listen(event: Event) -> None:
        if event.kind == "output":
            said.append(event.text)

    def nested(path: Path) -> bool:
        inner = Speculate([program(workspace, "echo up; sleep 300")], on_event=listen)
        return inner(Workspace(path)).committed

    def winner(path: Path) -> bool:
        while not said:
            time.sleep(0.01)
        assert processes_in(workspace.root)
        return True

    assert Speculate([nested, winner])(workspace).winner
    deadline = time.monotonic() + 30
    while processes_in(workspace.root):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    while workspace.branches():  # the inner call tidies up in its own thread
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_pattern_inside_a_candidate_commits_into_its_branch(workspace: Workspace) -> None:
    def nested(path: Path, depth: int = 3) -> bool:
        (path / f"depth-{depth}").write_text("x")
        if depth == 0:
            return True
        inner = Speculate([lambda p: False, lambda p: nested(p, depth - 1)])
        return inner(Workspace(path)).committed

    assert Speculate([nested])(workspace).committed
    assert len(list(workspace.path.glob("depth-*"))) == 4


def test_candidates_see_the_callers_context(workspace: Workspace) -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("mine")
    outcome = Speculate([lambda path: variable.get()])(workspace)
    assert outcome.all_results[0].return_value == "mine"


async def _later(*_: Path) -> bool:
    raise AssertionError("nobody awaits it")


def _bit_by_bit(*_: Path) -> Iterator[bool]:
    yield True


@pytest.mark.parametrize("function", [_later, _bit_by_bit], ids=["coroutine", "generator"])
def test_a_coroutine_function_is_not_a_success(
    workspace: Workspace, function: Callable[..., object]
) -> None:
    """A coroutine is true, whatever it would have said."""
    outcome = Speculate([function])(workspace)
    assert not outcome.committed
    assert isinstance(outcome.all_results[0].exception, TypeError)
    with pytest.raises(TypeError, match="synchronous functions"):
        Speculate([lambda path: True], setup=function)(workspace)
    told: list[str | None] = []
    Reflexion(
        lambda path, attempt, feedback: told.append(feedback),
        max_retries=2,
        critique=cast("Callable[[Path], str]", function),
    )(workspace)
    assert told == [None, None]


def test_an_interrupt_in_the_callers_thread_tidies_up(real_workspace: Workspace) -> None:
    """Ctrl-C in a program of the user, without a handler of the library."""
    import _thread

    def interrupts(path: Path) -> bool:
        _thread.interrupt_main()
        time.sleep(1)
        return False

    with pytest.raises(KeyboardInterrupt):
        Speculate([interrupts, program(real_workspace, "sleep 300")])(real_workspace)
    assert real_workspace.branches() == []


class TestSurroundingsThatFail:
    """An error of the file system during a call reaches the caller, and no branch is left."""

    @pytest.fixture
    def space(self, faked: Mounted) -> Workspace:
        return Workspace(faked.root)

    def test_a_branch_that_cannot_be_made(self, faked: Mounted, space: Workspace) -> None:
        assert faked.fake
        faked.fake.refuse_next["create"] = Refusal("io", "no space left on device")
        with pytest.raises(MountError, match="no space left"):
            Speculate([lambda path: True])(space)
        assert space.branches() == []

    def test_a_thread_that_cannot_be_started(
        self, space: Workspace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Hundreds may be more than the machine has room for; those that run are ended."""
        start = threading.Thread.start

        def started(thread: threading.Thread) -> None:
            if thread.name.endswith("-2"):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", started)
        with pytest.raises(ForkError, match=r"beside 2 that run; nothing was committed") as caught:
            Speculate([program(space, "sleep 300")] * 3)(space)
        assert "max_parallel" in str(caught.value.hint)
        assert space.branches() == []

    def test_a_commit_that_could_be_made_later_keeps_the_work(
        self, faked: Mounted, space: Workspace
    ) -> None:
        assert faked.fake
        faked.fake.refuse_next["commit"] = Refusal("conflict", "base changed", ("a", "b"))
        with pytest.raises(ConflictError) as caught:
            Speculate([lambda path: True, lambda path: time.sleep(1)])(space)
        assert caught.value.paths == ("a", "b")
        [kept] = space.branches()
        assert kept.name in (caught.value.hint or "")
        space._backend.abort(kept)

    def test_a_lost_race_leaves_nothing(self, faked: Mounted, space: Workspace) -> None:
        assert faked.fake
        faked.fake.refuse_next["commit"] = Refusal("stale", "a sibling was first")
        with pytest.raises(ConflictError):
            Speculate([lambda path: True])(space)
        assert space.branches() == []

    def test_a_failed_abort_is_reported(self, faked: Mounted, space: Workspace) -> None:
        assert faked.fake
        faked.fake.refuse_next["abort"] = Refusal("io", "disk on fire")
        with pytest.raises(AbortError, match="disk on fire"):
            Speculate([lambda path: False])(space)
        assert space.branches() == []

    def test_an_abort_that_fails_does_not_hide_the_first_error(
        self, faked: Mounted, space: Workspace
    ) -> None:
        assert faked.fake
        faked.fake.refuse_next["abort"] = Refusal("io", "disk on fire")

        def evaluate(path: Path) -> float:
            raise LookupError("mine")

        with pytest.raises(LookupError, match="mine") as caught:
            BestOfN([lambda path: True], evaluate=evaluate)(space)
        assert any("disk on fire" in note for note in getattr(caught.value, "__notes__", []))
        for record in space.branches():
            space._backend.abort(record)

    def test_a_daemon_that_dies_in_the_middle(self, faked: Mounted, space: Workspace) -> None:
        def candidate(path: Path) -> bool:
            space._backend._control._path = "/nowhere/control"  # type: ignore[attr-defined]
            space.close()
            return True

        with pytest.raises(CommitError, match=r"daemon of .* is gone") as caught:
            Speculate([candidate])(space)
        assert isinstance(caught.value, BranchingError)
        assert caught.value.hint


class TestProgram:
    @pytest.mark.contract("6.32", "6.41")
    def test_it_sets_the_variables_that_name_the_branch(self, workspace: Workspace) -> None:
        lines: list[str] = []

        def listen(event: Event) -> None:
            if event.kind == "output":
                lines.append(event.text)

        text = (
            'echo "$BRANCHING|$BRANCHING_BRANCH|$BRANCHING_WORKSPACE|$BRANCHING_ATTEMPT'
            '|$BRANCHING_FEEDBACK"; exit 1'
        )
        critic = Reader(shell("echo; echo no good; exit 1"), workspace=workspace.path, owner=None)
        outcome = Reflexion(program(workspace, text), 2, critique=critic, on_event=listen)(
            workspace
        )
        names = [result.branch_name for result in outcome.all_results]
        assert lines == [
            f"1|{names[0]}|{workspace.path}|0|",
            f"1|{names[1]}|{workspace.path}|1|no good",
        ]

    def test_a_long_feedback_keeps_its_end(self, workspace: Workspace) -> None:
        """The kernel takes no variable of 128 KiB or more."""
        critic = Reader(
            shell("head -c 300000 /dev/zero | tr '\\0' x; echo END"),
            workspace=workspace.path,
            owner=None,
        )
        task = program(
            workspace, 'test $BRANCHING_ATTEMPT = 1 && printf %s "$BRANCHING_FEEDBACK" > f'
        )
        assert Reflexion(task, 2, critique=critic)(workspace).committed
        found = (workspace.path / "f").read_text()
        assert found.startswith("[200003 bytes left out]\nx")
        assert found.endswith("xEND")
        assert len(found) <= FEEDBACK_BYTES_MAX + 100

    def test_a_critique_that_cannot_run_is_a_failed_critique(self, workspace: Workspace) -> None:
        events: list[Event] = []
        critic = Reader(["no-such-program"], workspace=workspace.path, owner=None)
        Reflexion(program(workspace, "false"), 2, critique=critic, on_event=events.append)(
            workspace
        )
        [critiqued] = [event for event in events if event.kind == "critiqued"]
        assert "no-such-program: not found" in critiqued.text

    @pytest.mark.contract("6.31")
    @pytest.mark.parametrize(
        ("written", "score"),
        [("0.25", 0.25), ("", 1.0), ("\\n", 1.0), ("1\\n2", 2.0), ("-3", -3.0)],
    )
    def test_the_score_is_the_last_line_if_it_is_a_number(
        self, workspace: Workspace, written: str, score: float
    ) -> None:
        text = f"printf '%b' '{written}' >&3"
        outcome = BestOfN([program(workspace, text, score=True)])(workspace)
        assert outcome.all_results[0].score == score

    @pytest.mark.parametrize("written", ["much", "score: 0.10", "0.9\\nworse"])
    def test_a_score_that_is_not_a_number_fails_the_candidate(
        self, workspace: Workspace, written: str
    ) -> None:
        """It would count as 1.0, and win over all honest scores below that."""
        honest = program(workspace, "echo 0.5 >&3; touch honest", score=True)
        odd = program(workspace, f"printf '%b' '{written}' >&3; touch odd", score=True)
        outcome = BestOfN([odd, honest])(workspace)
        assert outcome.winner is outcome.all_results[1]
        assert outcome.all_results[0].state == "error"
        assert "not a number" in str(outcome.all_results[0].exception)

    def test_a_score_of_nan_is_a_failure(self, workspace: Workspace) -> None:
        outcome = BestOfN([program(workspace, "echo nan >&3", score=True)])(workspace)
        assert outcome.all_results[0].state == "error"
        assert not outcome.committed

    def test_the_timeout_kills_commands(self, workspace: Workspace) -> None:
        started = time.monotonic()
        outcome = Speculate([program(workspace, "sleep 300")], timeout=0.3)(workspace)
        assert time.monotonic() - started < 60
        assert outcome.all_results[0].state == "timed_out"


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"a\nb\n"], ["a", "b"]),
        ([b"a", b"b\r\n", b"c"], ["ab", "c"]),
        ([b"\xc3", b"\xa9\n"], ["é"]),
        ([b"\xff\n"], ["\N{REPLACEMENT CHARACTER}"]),
        ([b"\n\n"], ["", ""]),
        ([b"x" * 10_000], ["x" * 10_000]),
        ([], []),
    ],
    ids=str,
)
def test_lines_are_cut_as_they_come(chunks: list[bytes], lines: list[str]) -> None:
    heard: list[str] = []
    cutter = LineSplitter(heard.append)
    for chunk in chunks:
        cutter.feed(chunk)
    cutter.finish()
    assert heard == lines


def test_lines_that_arrive_together_are_one_block() -> None:
    heard: list[str] = []
    cutter = BlockSplitter(heard.append)
    for chunk in (b"a\r\nb\n\nc", b"d\ne\r", b"\n", b"f"):
        cutter.feed(chunk)
    cutter.finish()
    assert heard == ["a\nb\n", "cd", "e", "f"]


@pytest.mark.parametrize("takes_blocks", [False, True], ids=["lines", "blocks"])
def test_a_listener_gets_each_line_unless_it_takes_blocks(takes_blocks: bool) -> None:
    heard: list[str] = []

    def listener(event: Event) -> None:
        heard.append(event.text)

    teller = EventDispatcher(
        taking_blocks(listener) if takes_blocks else listener, wake=lambda: None
    )
    branch: Any = SimpleNamespace(name="b")
    teller.say(Attempt(0, branch, ""), "a\nb\n")
    assert heard == (["a\nb\n"] if takes_blocks else ["a", "b", ""])
