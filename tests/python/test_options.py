"""The options that all seven patterns have in common."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Mounted

from branching import (
    BeamSearch,
    BestOfN,
    Cascaded,
    Reflexion,
    SetupError,
    Speculate,
    SpeculationOutcome,
    Tournament,
    TreeOfThoughts,
    Workspace,
)
from branching.fs import Change, DiffSummary
from branching.patterns import Event
from branching.patterns.command_candidate import Program, shell


def makes(path: Path, *_: object) -> bool:
    (path / "made").write_text("x")
    return True


def expand(path: Path, depth: int) -> list[Any]:
    return [makes]


SEVEN: dict[str, Callable[..., Any]] = {
    "Speculate": lambda function, **options: Speculate([function], **options),
    "BestOfN": lambda function, **options: BestOfN([function, function], **options),
    "Reflexion": Reflexion,
    "TreeOfThoughts": lambda function, **options: TreeOfThoughts(
        [function], expand=expand, max_depth=2, **options
    ),
    "BeamSearch": lambda function, **options: BeamSearch(
        [function, function], expand=expand, **options
    ),
    "Tournament": lambda function, **options: Tournament(
        [function, function], judge=lambda a, b: 1, **options
    ),
    "Cascaded": Cascaded,
}

seven = pytest.mark.parametrize("make", SEVEN.values(), ids=SEVEN)


@pytest.mark.contract("0.8")
@seven
def test_it_commits_one_success_and_leaves_no_branch(
    workspace: Workspace, make: Callable[..., Any]
) -> None:
    outcome = make(makes)(workspace)
    assert outcome.committed
    assert outcome.winner.state == "won"
    assert outcome.branch is None
    assert (workspace.path / "made").exists()


@seven
def test_commit_false_chooses_and_leaves_the_branch_to_the_caller(
    workspace: Workspace, make: Callable[..., Any]
) -> None:
    outcome = make(makes, commit=False)(workspace)
    assert not outcome.committed
    assert outcome.winner.success
    assert not (workspace.path / "made").exists()
    assert [record.name for record in workspace.branches()] == [outcome.branch.name]
    assert (outcome.branch.path / "made").exists()
    outcome.branch.commit()
    assert (workspace.path / "made").exists()


@pytest.mark.contract("4.8")
@seven
def test_a_runner_runs_the_candidates_elsewhere(
    workspace: Workspace, make: Callable[..., Any]
) -> None:
    calls: list[tuple[Path, float]] = []

    def runner(function: Any, arguments: Any, *, timeout: float) -> object:
        calls.append((arguments[0], timeout))
        return function(*arguments)

    outcome = make(makes, runner=runner, timeout=60)(workspace)
    assert outcome.committed
    assert outcome.winner.branch_path in [path for path, _ in calls]
    assert all(50 < timeout <= 60 for _, timeout in calls)


@seven
@pytest.mark.parametrize("option", ["resource_limits", "group_limits"])
def test_limits_are_resource_limits(make: Callable[..., Any], option: str) -> None:
    with pytest.raises(TypeError, match=f"{option} must be ResourceLimits"):
        make(makes, **{option: 64 << 20})


@seven
def test_events_end_with_the_commit(workspace: Workspace, make: Callable[..., Any]) -> None:
    events: list[Event] = []
    make(makes, on_event=events.append)(workspace)
    assert events[0].kind == "started"
    assert events[-1].kind == "committed"
    assert [event.kind for event in events].count("committed") == 1


@seven
def test_it_can_be_awaited(workspace: Workspace, make: Callable[..., Any]) -> None:
    async def main() -> SpeculationOutcome:
        has_ticked = threading.Event()

        async def tick() -> None:
            for _ in range(5):
                await asyncio.sleep(0.01)
            has_ticked.set()

        ticker = asyncio.create_task(tick())

        def slow(path: Path, *rest: object) -> bool:
            return has_ticked.wait(60) and makes(path)

        outcome: SpeculationOutcome = await make(slow).run_async(workspace)
        await ticker
        return outcome

    assert asyncio.run(main()).committed


@seven
def test_cancelling_the_task_ends_the_call(workspace: Workspace, make: Callable[..., Any]) -> None:
    started, release = threading.Event(), threading.Event()

    def hangs(path: Path, *_: object) -> bool:
        started.set()
        release.wait(10)
        return True

    async def main() -> None:
        task = asyncio.create_task(make(hangs).run_async(workspace))
        await asyncio.to_thread(started.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert workspace.branches() == []

    asyncio.run(main())
    release.set()


def test_an_exception_reaches_the_awaiting_task(workspace: Workspace) -> None:
    def evaluate(path: Path) -> float:
        raise LookupError("mine")

    async def main() -> None:
        with pytest.raises(LookupError, match="mine"):
            await BestOfN([makes], evaluate=evaluate).run_async(workspace)

    asyncio.run(main())


@seven
def test_a_setup_is_shared_by_all_and_committed_with_the_winner(
    workspace: Workspace, make: Callable[..., Any]
) -> None:
    """It runs once, before the candidates; each sees what it made."""
    calls: list[Path] = []

    def setup(path: Path) -> None:
        calls.append(path)
        (path / "prepared").write_text("x")

    def candidate(path: Path, *_: object) -> bool:
        return (path / "prepared").exists() and makes(path)

    assert make(candidate, setup=setup)(workspace).committed
    assert len(calls) == 1
    assert (workspace.path / "prepared").exists()
    assert (workspace.path / "made").exists()


@seven
def test_a_setup_without_a_winner_never_was(workspace: Workspace, make: Callable[..., Any]) -> None:
    def setup(path: Path) -> None:
        (path / "prepared").write_text("x")

    assert not make(lambda *_: False, setup=setup)(workspace).committed
    assert not (workspace.path / "prepared").exists()


def test_a_setup_that_fails_lets_nothing_be_tried(workspace: Workspace) -> None:
    tried: list[Path] = []
    program = Program(shell("echo x > made; exit 3"), workspace=workspace.path, owner=None)
    for setup, text in ((program, "exit 3"), (lambda path: False, "False")):
        with pytest.raises(SetupError, match=text):
            Speculate([tried.append], setup=setup)(workspace)

    def raises(path: Path) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        Speculate([tried.append], setup=raises)(workspace)
    assert tried == []
    assert not (workspace.path / "made").exists()


def test_a_setup_counts_for_the_timeout(workspace: Workspace) -> None:
    is_over = threading.Event()
    setup: Any = lambda path: is_over.wait(60)  # noqa: E731
    outcome = Speculate([makes], setup=setup, timeout=0.1)(workspace)
    is_over.set()
    assert (outcome.committed, outcome.timed_out, outcome.all_results) == (False, True, [])


def test_with_a_setup_commit_false_leaves_one_branch_that_has_both(workspace: Workspace) -> None:
    def setup(path: Path) -> None:
        (path / "prepared").write_text("x")

    branch = Speculate([makes], setup=setup, commit=False)(workspace).branch
    assert branch
    assert {(branch.path / name).read_text() for name in ("made", "prepared")} == {"x"}
    assert [record.name for record in workspace.branches()] == [branch.name]
    branch.abort()


@seven
def test_only_some_paths_can_be_committed(faked: Mounted, make: Callable[..., Any]) -> None:
    def candidate(path: Path, *_: object) -> bool:
        (path / "left-out").write_text("x")
        return makes(path)

    workspace = Workspace(faked.root)
    outcome = make(candidate, only=["ma*"])(workspace)
    assert [(change.path, change.change) for change in outcome.changes] == [("made", "added")]
    assert (faked.root / "made").exists()
    assert not (faked.root / "left-out").exists()
    assert (outcome.committed, outcome.remaining) == (True, 1)
    assert outcome.branch
    assert [change.path for change in outcome.branch.diff()] == ["left-out"]
    assert [record.name for record in workspace.branches()] == [outcome.branch.name]
    outcome.branch.commit()
    assert (faked.root / "left-out").exists()
    (faked.root / "made").unlink()
    (faked.root / "left-out").unlink()
    outcome = make(candidate, only=["ma*"], drop_rest=True)(workspace)
    assert (outcome.committed, outcome.remaining, outcome.branch) == (True, 0, None)
    assert not (faked.root / "left-out").exists()
    assert workspace.branches() == []
    workspace.close()


def test_the_paths_to_commit_are_a_list() -> None:
    with pytest.raises(TypeError, match="only must be a sequence"):
        Speculate([makes], only="made")


@seven
def test_failures_can_be_kept(workspace: Workspace, make: Callable[..., Any]) -> None:
    def fails(path: Path, *_: object) -> bool:
        (path / "made").write_text("x")
        return False

    outcome = make(fails, keep_failed=True)(workspace)
    kept = [result.branch_name for result in outcome.all_results if result.kept]
    assert len(kept) == len(outcome.all_results) > 0
    for name in kept:
        branch = workspace.reopen(name)
        assert (branch.path / "made").exists()
        branch.abort()
    for record in workspace.branches():  # TreeOfThoughts keeps the root of its branches too
        workspace.reopen(record.name).abort()


@seven
def test_kept_failures_go_when_there_is_a_winner(
    workspace: Workspace, make: Callable[..., Any]
) -> None:
    outcome = make(makes, keep_failed=True)(workspace)
    assert outcome.committed
    assert not any(result.kept for result in outcome.all_results)


@seven
def test_results_say_how_much_was_changed(workspace: Workspace, make: Callable[..., Any]) -> None:
    """Each result has a diff summary."""
    events: list[Event] = []

    def candidate(path: Path, *_: object) -> bool:
        (path / path.name.strip("@")).write_text("x")
        return True

    outcome = make(candidate, on_event=events.append)(workspace)
    assert outcome.winner.changes == DiffSummary(added=1)
    assert events[-1].changes == outcome.winner.changes
    assert {change.change for change in outcome.changes} == {"added"}
    assert all((workspace.path / change.path).exists() for change in outcome.changes)


def test_failures_say_how_much_they_had_changed(workspace: Workspace) -> None:
    outcome = Speculate([lambda path: not makes(path), lambda path: False])(workspace)
    assert [result.changes for result in outcome.all_results] == [
        DiffSummary(added=1),
        DiffSummary(),
    ]


def test_a_diff_summary_counts_by_kind() -> None:
    kinds = ["added", "added", "modified", "type", "metadata", "deleted", "renamed"]
    summary = DiffSummary.of(Change(path=kind, change=kind, kind="file") for kind in kinds)
    assert str(summary) == "2 added, 3 modified, 1 deleted, 1 renamed"
    assert summary.total == 7
    assert str(DiffSummary()) == "no changes"


def test_the_seven_can_be_awaited_at_once(workspace: Workspace) -> None:
    async def main() -> list[SpeculationOutcome]:
        calls = [make(makes, commit=False).run_async(workspace) for make in SEVEN.values()]
        return list(await asyncio.gather(*calls))

    outcomes = asyncio.run(main())
    for outcome in outcomes:
        assert outcome.winner
        assert outcome.branch
        outcome.branch.abort()
