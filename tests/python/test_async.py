"""Branches and workspaces with `async with`: as with `with`, and cancellation is an exception."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
from conftest import Mounted

from branching import (
    BestOfN,
    BranchContext,
    ConflictError,
    NamespaceError,
    ProcessBranchError,
    Speculate,
    Workspace,
)
from branching._threads import call_soon, run_in_loop, run_in_thread


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


def test_other_tasks_run_meanwhile(workspace: Workspace) -> None:
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


class TestBranchContext:
    """Awaited contexts. Tests wait for the effect of a target before they end it."""

    def test_a_process_is_awaited_while_other_tasks_run(self, place: Path) -> None:
        """The process ends when a task that runs meanwhile has made a file."""
        script = "until [ -e go ]; do sleep 0.01; done"

        async def main() -> None:
            async with BranchContext(["sh", "-c", script], place) as context:
                waiting = asyncio.create_task(context.wait_async())
                await asyncio.sleep(0)
                assert not waiting.done()
                (place / "go").touch()
                await asyncio.wait_for(waiting, 60)
                assert context.result.success

        asyncio.run(main())

    def test_a_failure_is_raised(self, place: Path) -> None:
        async def main() -> None:
            async with BranchContext(["sh", "-c", "exit 3"], place) as context:
                with pytest.raises(ProcessBranchError, match="status 3"):
                    await context.wait_async()

        asyncio.run(main())

    def test_cancelling_the_wait_ends_the_process(self, place: Path) -> None:
        async def main() -> None:
            async with BranchContext(["sh", "-c", "touch up; sleep 600"], place) as context:
                await until_there(place / "up")
                waiting = asyncio.create_task(context.wait_async())
                await asyncio.sleep(0)  # a task that has not begun would wait for nothing
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                assert not context.alive
                assert context.result.ended == "cancelled"

        asyncio.run(main())

    @pytest.mark.contract("3.10")
    def test_several_are_started_and_ended_together(self, place: Path) -> None:
        """Each is known to run before the end of the `with` stops it."""
        places = [place / name for name in "ab"]
        for each in places:
            each.mkdir()
        commands = [["sh", "-c", f"echo {name} > up; sleep 600"] for name in "ab"]

        async def main() -> list[BranchContext]:
            async with BranchContext.create(commands, places) as contexts:
                for each in places:
                    await until_there(each / "up")
            return contexts

        contexts = asyncio.run(main())
        assert [context.result.ended for context in contexts] == ["cancelled"] * 2

    def test_one_that_cannot_be_started_ends_those_that_were(self, place: Path) -> None:
        async def main() -> None:
            commands = [["sleep", "600"], ["sleep", "600"]]
            async with BranchContext.create(commands, [place, place / "none"]):
                raise AssertionError("it was not started")

        with pytest.raises(NamespaceError):
            asyncio.run(main())

    def test_as_many_workspaces_as_targets(self) -> None:
        async def main() -> None:
            async with BranchContext.create([print], []):
                pass

        with pytest.raises(ValueError, match="same length"):
            asyncio.run(main())


async def until_there(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        await asyncio.sleep(0.01)


def test_an_iteration_that_ends_in_a_callback_is_an_error_and_no_hang(workspace: Workspace) -> None:
    def evaluate(path: Path) -> float:
        raise StopIteration

    async def main() -> None:
        await asyncio.wait_for(BestOfN([bool], evaluate=evaluate).run_async(workspace), 60)

    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(main())


def test_a_thread_waits_for_a_coroutine_in_an_event_loop_or_cancels_it() -> None:
    async def wait_for_ever(cancelled: asyncio.Event) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def main() -> asyncio.AbstractEventLoop:
        loop, cancelled = asyncio.get_running_loop(), asyncio.Event()
        assert await run_in_thread(lambda: run_in_loop(loop, asyncio.sleep(0, "slept"))) == "slept"
        with pytest.raises(TimeoutError):
            coroutine = wait_for_ever(cancelled)
            await run_in_thread(lambda: run_in_loop(loop, coroutine, seconds_max=0.01))
        await asyncio.wait_for(cancelled.wait(), 10)
        return loop

    call_soon(asyncio.run(main()), pytest.fail)  # the loop is closed: not called, and no error
