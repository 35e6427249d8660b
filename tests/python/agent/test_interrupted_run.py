"""A run that is cancelled, or raises, while its fork is open."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic_ai.messages import ModelMessage, ModelResponse
from support.agents import coordinator, forever, run, specs, until
from support.branchfs import find_program
from support.command import branching

from branching import Workspace
from branching.agent.checkpoint import InMemoryCheckpointStore
from branching.agent.coordinator import ForkCoordinator
from branching.agent.errors import ForkStateError
from branching.agent.fork_store import SQLiteForkStateStore
from branching.agent.kept_patches import keep_patches
from branching.agent.pydantic_ai import LiveForkCapability

from .scripted import call, model_of, prompts, returned, say, since_prompt, working_agent

END_SECONDS_MAX = 3.0
"""An end that waits for a busy mount takes more than 5 seconds."""


PROGRAM_SECONDS_MAX = 60
PROGRAM = """
import asyncio, sys
from pathlib import Path
from agent.test_interrupted_run import Program
from branching import Workspace

async def main():
    project = Path(sys.argv[1])
    with Workspace.open(project) as workspace:
        program = Program(project, workspace)

        async def say():
            await program.is_ready.wait()
            print("ready", flush=True)

        saying = asyncio.create_task(say())
        await program.agent.run("cancel")
        await saying

asyncio.run(main())
"""
"""Runs until it is interrupted; says when its branches work."""


class Interrupted(Exception):
    """Raised by the parent's model while its branches run."""


class Program:
    """An agent whose two branches sleep in their shells, and which writes a file after the fork."""

    def __init__(self, project: Path, workspace: Workspace, store: Any = None) -> None:
        self.project = project
        self.workspace = workspace
        self.is_ready = asyncio.Event()
        self.interrupted_at = 0.0
        self.notes: list[str] = []
        capability = LiveForkCapability(
            place=workspace, store=store, checkpoint_store=InMemoryCheckpointStore()
        )
        self.agent = working_agent(model_of(self._answer), capabilities=[capability])

        @self.agent.tool_plain
        async def interrupt(how: str) -> str:
            """Wait until both branches run their command, then end the run."""
            branches = self.workspace.branches()
            paths = [branch.path for branch in branches if not branch.name.endswith(".parent")]
            await until(lambda: all((path / "started").exists() for path in paths))
            self.interrupted_at = time.monotonic()
            if how == "raise":
                raise Interrupted
            self.is_ready.set()
            await asyncio.Event().wait()
            return "never"

    def _answer(self, messages: list[ModelMessage]) -> ModelResponse:
        told = prompts(messages)[-1]
        if told == "sleep":
            if since_prompt(messages) == 0:
                return call("shell", command="echo work > started; sleep 1000")
            return say("slept")
        if not returned(messages, "fork_run"):
            both = [{"label": label, "steer": "sleep"} for label in "ab"]
            return call("fork_run", specs=both)
        if not returned(messages, "shell"):
            return call("shell", command="echo mine > parent.txt")
        return call("interrupt", how=told)

    async def run(self, how: str) -> None:
        if how == "raise":
            with pytest.raises(Interrupted) as raised:
                await self.agent.run(how)
            self.notes = getattr(raised.value, "__notes__", [])
            return
        task = asyncio.create_task(self.agent.run(how))
        await self.is_ready.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory of a person, mounted by the program that needs it."""
    (tmp_path / "project").mkdir()
    return tmp_path / "project"


@pytest.mark.parametrize("how", ["raise", "cancel"])
def test_an_interrupted_run_ends_its_fork_promptly(project: Path, how: str) -> None:
    """The parent's own files land, no branch is left, and the mount is not busy at its end."""
    with Workspace.open(project) as workspace:
        program = Program(project, workspace)
        run(program.run(how))
        assert workspace.branches() == []
    assert time.monotonic() - program.interrupted_at < END_SECONDS_MAX
    assert (project / "parent.txt").read_text() == "mine\n"
    assert not (project / "started").exists()


def test_the_work_of_the_branches_of_an_interrupted_run_is_kept_as_patches(project: Path) -> None:
    with Workspace.open(project) as workspace:
        program = Program(project, workspace)
        run(program.run("raise"))
    kept = [re.search("the changes of branch (.*) are saved: (.*)", note) for note in program.notes]
    assert [each and each[1].rpartition("-")[2] for each in kept] == ["a", "b"]
    for each in kept:
        assert each is not None
        done = branching(project, *each[2].removeprefix("branching ").split())
        assert "+++ b/started\n@@ -0,0 +1 @@\n+work\n" in done.out, done.err
    assert not (project / "started").exists()


@pytest.mark.parametrize("cancels", ["run", "all tasks"])
def test_a_second_cancellation_cuts_no_clean_up_short(
    project: Path, monkeypatch: pytest.MonkeyPatch, cancels: str
) -> None:
    """It comes while the work of the branches is being kept, as with a second Ctrl-C, at which the
    event loop cancels all its tasks."""
    kept: list[str] = []

    async def work(program: Program) -> None:
        ours = asyncio.all_tasks()
        task = asyncio.create_task(program.agent.run("cancel"))
        loop = asyncio.get_running_loop()
        is_cancelled = threading.Event()

        def cancel() -> None:
            others = asyncio.all_tasks() - ours if cancels == "all tasks" else {task}
            for each in others:
                each.cancel()
            is_cancelled.set()

        def keep_meanwhile(*arguments: Any) -> list[str]:
            if not is_cancelled.is_set():
                loop.call_soon_threadsafe(cancel)
                assert is_cancelled.wait(PROGRAM_SECONDS_MAX)
            kept.extend(keep_patches(*arguments))
            return kept

        monkeypatch.setattr("branching.agent.coordinator.keep_patches", keep_meanwhile)
        await program.is_ready.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with Workspace.open(project) as workspace:
        run(work(Program(project, workspace)))
        assert workspace.branches() == []
    assert (project / "parent.txt").read_text() == "mine\n"
    for name in set(kept):
        assert "+work\n" in branching(project, "log", "--patch", name).out
    assert len(set(kept)) >= 2


def test_a_keyboard_interrupt_ends_the_fork_and_keeps_the_work(project: Path) -> None:
    """A child process gets SIGINT while its branches run commands."""
    tests = Path(__file__).parents[1]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(project)],
        env={**os.environ, "BRANCHFS": find_program(), "PYTHONPATH": str(tests)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PROGRAM_SECONDS_MAX)
    assert process.returncode == -signal.SIGINT, errors
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert (project / "parent.txt").read_text() == "mine\n"
    listed = json.loads(branching(project, "ls", "--json").out)
    assert listed["branches"] == []
    logged = json.loads(branching(project, "log", "--json").out)["candidates"]
    assert [each["state"] for each in logged] == ["terminated"] * 2
    for name in [each["branch"] for each in logged]:
        assert "+work\n" in branching(project, "log", name, "--patch").out


@pytest.mark.parametrize("how", ["raise", "cancel"])
def test_a_fork_in_a_durable_store_is_stopped_and_can_be_resumed(project: Path, how: str) -> None:
    with Workspace.open(project) as workspace:
        store = SQLiteForkStateStore.beside(workspace)
        program = Program(project, workspace, store)
        run(program.run(how))
        [state] = store.list_all()
        store.close()
    assert time.monotonic() - program.interrupted_at < END_SECONDS_MAX
    assert [branch.status.state for branch in state.branches] == ["terminated"] * 2

    with Workspace.open(project) as workspace:
        store = SQLiteForkStateStore.beside(workspace)

        async def drop() -> None:
            resumed = await _resumed(state.fork_id, store, workspace)
            assert [branch.status.state for branch in resumed.branches.values()] == [
                "terminated"
            ] * 2
            await resumed.aclose()

        run(drop())
        store.close()
        assert workspace.branches() == []
    assert (project / "parent.txt").read_text() == "mine\n"


async def _resumed(fork_id: str, store: Any, workspace: Workspace) -> ForkCoordinator:
    from branching.agent.pydantic_ai import AgentRunner, MessagesCodec

    agent = working_agent(model_of(lambda _: say("unused")))
    return await ForkCoordinator.resume(
        fork_id,
        store=store,
        runner=lambda branch: AgentRunner(agent, branch),
        codec=MessagesCodec(),
        place=workspace,
    )


def test_leaving_the_coordinators_block_by_an_exception_aborts_the_fork(
    real_workspace: Workspace,
) -> None:
    async def work() -> None:
        made = coordinator(real_workspace, {"a": forever})
        with pytest.raises(Interrupted):
            async with made as entered:
                assert entered is made
                await made.fork(specs("a"), parent_history=[{"role": "user", "content": "hi"}])
                raise Interrupted
        assert made.is_resolved
        assert real_workspace.branches() == []

    run(work())


def test_leaving_the_coordinators_block_aborts_a_fork_that_is_still_open(
    real_workspace: Workspace,
) -> None:
    async def work() -> None:
        async with coordinator(real_workspace, {"a": forever}) as made:
            await made.fork(specs("a"), parent_history=[{"role": "user", "content": "hi"}])
        assert made.is_resolved
        with pytest.raises(ForkStateError):
            await made.abort_fork()

    run(work())


def test_a_run_that_is_cancelled_with_its_loop_stops_what_it_started() -> None:
    """Without a block around it, the end of `asyncio.run` cancels the run of each branch."""
    stops: list[Callable[[], int]] = []

    async def work() -> None:
        made = coordinator(None, {"a": forever})
        await made.fork(specs("a"), parent_history=[{"role": "user", "content": "hi"}])
        [branch] = made.branches.values()
        runner: Any = branch.runner
        stops.append(lambda: runner.stops)
        await until(lambda: branch.partial_history is not None)

    asyncio.run(work())
    assert stops[0]() == 1
