"""Branches and workspaces with `async with`: as with `with`, and cancellation is an exception."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from conftest import Mounted

from branching import ConflictError, Speculate, Workspace


def test_a_branch_is_committed_on_a_clean_exit_and_aborted_on_an_exception(
    workspace: Workspace,
) -> None:
    async def main() -> None:
        async with workspace.branch("good") as branch:
            (branch.path / "made").write_text("x")
            async with branch.branch("inner") as inner:
                (inner.path / "inner").write_text("x")
        with pytest.raises(LookupError):
            async with workspace.branch("bad") as branch:
                (branch.path / "bad").write_text("x")
                raise LookupError

    asyncio.run(main())
    found = {path.name for path in workspace.path.iterdir()}
    assert {"made", "inner"} <= found
    assert "bad" not in found


def test_a_lost_race_is_raised(workspace: Workspace) -> None:
    async def main() -> None:
        with pytest.raises(ConflictError):
            async with workspace.branch("a") as a, workspace.branch("b") as b:
                (a.path / "a").write_text("x")
                (b.path / "b").write_text("x")
                b.commit()

    asyncio.run(main())


def test_cancelling_aborts(workspace: Workspace) -> None:
    async def work(opened: asyncio.Event) -> None:
        async with workspace.branch("b") as branch:
            (branch.path / "made").write_text("x")
            opened.set()
            await asyncio.sleep(60)

    async def main() -> None:
        opened = asyncio.Event()
        task = asyncio.create_task(work(opened))
        await asyncio.wait_for(opened.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert workspace.branches() == []

    asyncio.run(main())
    assert not (workspace.path / "made").exists()


def test_cancelling_while_the_branch_is_made_leaves_none(
    faked: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon answers only after the task was cancelled."""
    assert faked.fake
    asked, cancelled = threading.Event(), threading.Event()
    create = faked.fake._create

    def slow(**fields: object) -> object:
        asked.set()
        assert cancelled.wait(60)
        return create(**fields)  # type: ignore[arg-type]

    monkeypatch.setattr(faked.fake, "_create", slow)

    async def work(workspace: Workspace) -> None:
        async with workspace.branch("b"):
            raise AssertionError("it was cancelled before")

    async def main() -> None:
        async with Workspace(faked.root) as workspace:
            task = asyncio.create_task(work(workspace))
            await asyncio.to_thread(asked.wait, 60)
            task.cancel()
            await asyncio.sleep(0)
            cancelled.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert workspace.branches() == []

    asyncio.run(main())


def test_other_tasks_go_on_meanwhile(workspace: Workspace) -> None:
    """A hundred branches are made and dropped while one task counts."""

    async def one(number: int) -> None:
        async with workspace.branch(f"b{number}", on_success=None) as branch:
            branch.abort()

    async def main() -> None:
        await asyncio.gather(*(one(number) for number in range(100)))
        assert workspace.branches() == []

    asyncio.run(main())


def test_patterns_and_branches_mix(workspace: Workspace) -> None:
    def candidate(path: Path) -> bool:
        (path / "made").write_text("x")
        return True

    async def main() -> None:
        async with workspace.branch("outer") as outer:
            outcome = await Speculate([candidate]).run_async(outer)
            assert outcome.committed
            assert not (workspace.path / "made").exists()

    asyncio.run(main())
    assert (workspace.path / "made").exists()
