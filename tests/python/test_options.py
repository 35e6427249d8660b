"""What all seven patterns have in common (contract 0.3, 3.16, 3.18, 4.8; issue: asyncio)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from branching import (
    BeamSearch,
    BestOfN,
    Cascaded,
    ProcessBranchError,
    Reflexion,
    Speculate,
    SpeculationOutcome,
    Tournament,
    TreeOfThoughts,
    Workspace,
)
from branching.patterns import Event


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


@seven
def test_a_runner_runs_the_candidates_elsewhere(
    workspace: Workspace, make: Callable[..., Any]
) -> None:
    """4.8"""
    calls: list[tuple[Path, float]] = []

    def runner(function: Any, arguments: Any, *, timeout: float) -> object:
        calls.append((arguments[0], timeout))
        return function(*arguments)

    outcome = make(makes, runner=runner, timeout=60)(workspace)
    assert outcome.committed
    assert outcome.winner.branch_path in [path for path, _ in calls]
    assert all(50 < timeout <= 60 for _, timeout in calls)


@seven
@pytest.mark.parametrize(
    "options",
    [{"isolate_processes": True}, {"resource_limits": object()}, {"group_limits": object()}],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused(
    make: Callable[..., Any], options: dict[str, Any]
) -> None:
    """0.3, 3.15, 3.16, 3.18"""
    with pytest.raises(ProcessBranchError, match="cannot be honoured"):
        make(makes, **options)
    make(makes, isolate_processes=False, resource_limits=None, group_limits=None)


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
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.01)

        ticker = asyncio.create_task(tick())

        def slow(path: Path, *rest: object) -> bool:
            time.sleep(0.1)
            return makes(path)

        outcome: SpeculationOutcome = await make(slow).run_async(workspace)
        ticker.cancel()
        assert ticks >= 5
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


def test_the_seven_can_be_awaited_at_once(workspace: Workspace) -> None:
    async def main() -> list[SpeculationOutcome]:
        calls = [make(makes, commit=False).run_async(workspace) for make in SEVEN.values()]
        return list(await asyncio.gather(*calls))

    outcomes = asyncio.run(main())
    for outcome in outcomes:
        assert outcome.winner
        assert outcome.branch
        outcome.branch.abort()
