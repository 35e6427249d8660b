"""Runs without a language model: a script for each branch says what the run does."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from branching.agent.branch_runtime import BranchRuntime
from branching.agent.checkpoint import InMemoryCheckpointStore
from branching.agent.coordinator import ForkCoordinator
from branching.agent.protocols import History, RunOutcome
from branching.agent.types import BranchSpec, Usage
from branching.fs import Branch, Workspace

T = TypeVar("T")
WAIT_SECONDS_MAX = 90


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a test's coroutine, within a generous limit."""
    return asyncio.run(asyncio.wait_for(work, WAIT_SECONDS_MAX))


async def until(condition: Callable[[], object]) -> None:
    """Waits for a condition; the test's own limit ends it."""
    while not condition():
        await asyncio.sleep(0.005)


class ScriptedRunner:
    """Runs one branch by its script."""

    def __init__(self, branch: BranchRuntime, script: Script) -> None:
        self.branch = branch
        self.messages: list[dict[str, Any]] = []
        self.prompts: list[str] = []
        self.controlled: list[str] = []
        self.stops = 0
        self._script = script

    async def run(self, prompt: str, history: History) -> RunOutcome:
        self.prompts.append(prompt)
        self.messages = [*history, {"role": "user", "content": prompt}]
        await self._script(self)
        return RunOutcome(history=self.messages, final_message=self.messages[-1]["content"])

    def steer(self, text: str) -> None:
        self.controlled.append(text)

    async def stop(self) -> None:
        self.stops += 1

    async def say(
        self, text: str, *, usd: float | None = 0.0, tokens: int = 0, **more: Any
    ) -> None:
        """One request to the model, and its answer."""
        with self.branch.request(is_priced=usd is not None) as meter:
            self.branch.capture(self.messages)
            await asyncio.sleep(0)
            meter.used(Usage(usd=usd, tokens=tokens))
        self.messages.append({"role": "assistant", "content": text, **more})

    def write(self, path: str, text: str) -> None:
        """Writes a file as any program does."""
        assert self.branch.path is not None
        place = self.branch.path / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


Script = Callable[[ScriptedRunner], Awaitable[None]]


def writing(**files: str) -> Script:
    """A script that writes files; `__` in a name is a slash, `_` at its end a dot and `py`."""

    async def script(runner: ScriptedRunner) -> None:
        for name, text in files.items():
            runner.write(name.replace("__", "/"), text)
        await runner.say("done")

    return script


async def forever(runner: ScriptedRunner) -> None:
    """A run that ends only by being stopped; it has made one request."""
    await runner.say("working")
    runner.branch.capture(runner.messages)
    await asyncio.Event().wait()


class Runners:
    """A runner factory: one script a label."""

    def __init__(self, scripts: dict[str, Script]) -> None:
        self.scripts = scripts
        self.made: dict[str, ScriptedRunner] = {}

    def __call__(self, branch: BranchRuntime) -> ScriptedRunner:
        label = branch.spec.label
        self.made[label] = ScriptedRunner(branch, self.scripts[label])
        return self.made[label]


def specs(*labels: str, **options: Any) -> list[BranchSpec]:
    return [BranchSpec(label, f"go {label}", **options) for label in labels]


def coordinator(
    place: Workspace | Branch | None, scripts: dict[str, Script], **options: Any
) -> ForkCoordinator:
    """A coordinator of scripted runs, with checkpoints in memory."""
    options.setdefault("checkpoint_store", InMemoryCheckpointStore())
    return ForkCoordinator(runner=Runners(scripts), place=place, **options)


def runner_of(made: ForkCoordinator, label: str) -> ScriptedRunner:
    """The runner of the branch with that label."""
    runner = branch_of(made, label).runner
    assert isinstance(runner, ScriptedRunner)
    return runner


def branch_of(made: ForkCoordinator, label: str) -> BranchRuntime:
    [branch] = [branch for branch in made.branches.values() if branch.spec.label == label]
    return branch


async def all_ended(made: ForkCoordinator) -> None:
    """Waits until no branch runs."""
    await until(lambda: not any(branch.is_running for branch in made.branches.values()))


_PROGRAM = """
    import asyncio, os, sys
    from pathlib import Path
    from support.agents import *
    from branching import Workspace
    from branching.agent.checkpoint_store import SQLiteCheckpointStore
    from branching.agent.fork_store import SQLiteForkStateStore
    from branching.agent import fork as fork_module, fork_session, parent_workspace as place_module
    workspace = Workspace(sys.argv[1])
    store = SQLiteForkStateStore.beside(workspace)
    checkpoints = SQLiteCheckpointStore.beside(workspace)
    def now():
        print("now", flush=True)
        import time
        while True: time.sleep(1)
"""


def died(root: Path, script: str) -> None:
    """Runs a program in the workspace at `root`; kills it once it says `now()`."""
    tests = Path(__file__).parents[1]
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_PROGRAM) + textwrap.dedent(script), str(root)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tests,
        env={**os.environ, "PYTHONPATH": f"{tests}:{os.environ.get('PYTHONPATH', '')}"},
    )
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        said.append(line.strip())
        if line == "now\n":
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert said, "the program ended before its time"
    assert said[-1] == "now", said
