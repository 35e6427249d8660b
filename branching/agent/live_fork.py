"""Live forking of an agent's runs: what the adapters of agent frameworks have in common.

    LiveFork     one conversation that can fork. The adapter of a framework derives from it, makes
                 the framework's tools of `functions`, and runs a branch in `run_branch`
    ForkingRun   one run: the parent's or a branch's. The tools act on the run that calls them
    RunFiles     commands and files of one run, wherever it works at the moment

A context variable names the branch's run, so that one set of tools serves the parent and all
branches: a tool that is called in a branch finds the branch. Commands of a run share its files with
each other; a fork or a merge waits for them and makes later ones wait.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from branching._threads import run_in_thread
from branching.agent.branch_runtime import BranchRuntime
from branching.agent.confidence import Confidence
from branching.agent.coordinator import ForkCoordinator
from branching.agent.cost_estimate import TokenPrice
from branching.agent.errors import ForkStateError
from branching.agent.fork_tools import SEQUENTIAL, ForkTools, answered
from branching.agent.judge import (
    DIFF_CHARACTERS_MAX,
    ModelJudge,
    Panel,
    SingleJudge,
    cut,
    described_report,
)
from branching.agent.protocols import ConversationCodec, History, Judge, RunOutcome
from branching.agent.sandbox import BranchSandbox, Completed
from branching.agent.types import BranchDiffReport, MergeResult, Usage
from branching.fs import Branch, Workspace

if TYPE_CHECKING:
    from typing_extensions import Self

OUTPUT_CHARACTERS_MAX = 20_000
"""Of one command's output, in the answer of `run_command`."""
COMMAND_SECONDS_MAX = 600.0
"""Default time limit of `run_command`, in seconds."""
MILLION = 1_000_000

Price = Callable[[str], TokenPrice | None]
"""Returns the price of a model by its name; None if it is unknown."""


def cost(price: TokenPrice | None, input_tokens: int, output_tokens: int) -> Usage:
    """Returns the usage of one request. Without a price its cost is unknown."""
    usd = None
    if price is not None:
        usd = (input_tokens * price.input_usd + output_tokens * price.output_usd) / MILLION
    return Usage(usd=usd, tokens=input_tokens + output_tokens, requests=1)


class RunFiles:
    """Commands and files of one run, in a sandbox at the workspace's path.

    The directory may change: after a fork, the parent continues in its own branch until the merge.
    Background processes in the earlier directory are ended then.
    """

    def __init__(
        self,
        where: Callable[[], Path | None],
        *,
        seen_at: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._where = where
        self._seen_at = seen_at
        self._environment = environment
        self._sandbox: BranchSandbox | None = None
        self._entry = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        self._commands = 0

    @property
    def path(self) -> Path | None:
        """The directory itself, outside the sandbox. None for a run without files."""
        return self._where()

    async def run(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Completed:
        """Runs a program, or a line of shell, until it ends, with empty input.

        Args:
            command: A line for `/bin/sh`, or the words of a program.
            env: Variables to set for it.
            timeout: Seconds after which it is killed; by default none.

        Returns:
            Its exit code and output; `how` is "timeout" or "output" if it was killed.

        Raises:
            ForkStateError: The run has no files.
            BranchingError: The sandbox cannot be started, or has ended.
        """
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        async with self._shared() as sandbox:
            return await sandbox.run(argv, env=env, timeout=timeout)

    async def read(self, path: str) -> bytes:
        """Returns the content of a file. A relative path is below the workspace. OSError."""
        async with self._shared() as sandbox:
            _, body = await sandbox.call("read", path=str(sandbox.seen_at / path))
            return body

    async def write(self, path: str, data: bytes) -> None:
        """Writes a file, and the directories above it. A relative path is below the workspace.
        OSError."""
        async with self._shared() as sandbox:
            await sandbox.call("write", data, path=str(sandbox.seen_at / path))

    async def close(self) -> None:
        """Ends all that runs in the sandbox. A later call starts a new one."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await run_in_thread(sandbox.close)

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Waits until no command of this run is running, and blocks new ones during the `with`."""
        async with self._entry:
            await self._idle.wait()
            yield

    @asynccontextmanager
    async def _shared(self) -> AsyncIterator[BranchSandbox]:
        async with self._entry:
            self._commands += 1
            self._idle.clear()
        try:
            yield await self._current()
        finally:
            self._commands -= 1
            if not self._commands:
                self._idle.set()

    async def _current(self) -> BranchSandbox:
        place = self._where()
        if place is None:
            raise ForkStateError("this run has no files", hint="pass place=WORKSPACE")
        earlier = self._sandbox
        if earlier is None or earlier.directory != place:
            self._sandbox = BranchSandbox(
                place, seen_at=self._seen_at, environment=self._environment
            )
            if earlier is not None:
                await run_in_thread(earlier.close)
        assert self._sandbox is not None
        return self._sandbox


class ForkingRun:
    """The run of the parent, or of one branch."""

    def __init__(
        self,
        forks: LiveFork,
        coordinator: Callable[[], ForkCoordinator],
        files: RunFiles,
        branch: BranchRuntime | None = None,
    ) -> None:
        self.forks = forks
        self.branch = branch
        self.files = files
        self.messages: History = []
        """The conversation up to the request that is being answered."""
        self.merged: MergeResult | None = None
        """A merge whose conversation the run has not adopted yet."""
        self.steered: list[str] = []
        """Messages to the run that its model has not seen yet."""
        self._coordinator = coordinator
        self.deps = None if branch is None else _deps(branch)
        """The branch's dependencies: the parent's, or its own clone of them."""

    @property
    def coordinator(self) -> ForkCoordinator:
        """The coordinator of the forks that this run makes."""
        return self._coordinator()

    def take_merged(self) -> MergeResult | None:
        """Returns the merge to adopt, once; then None."""
        merged, self.merged = self.merged, None
        return merged

    def take_steered(self) -> list[str]:
        """Returns the message for the run, once; then None."""
        steered, self.steered = self.steered, []
        return steered


current_run: ContextVar[ForkingRun | None] = ContextVar("current_run", default=None)
"""The run that the code runs for; None in a parent that nothing has announced."""


class LiveFork(ABC):
    """One conversation of an agent that can fork itself; the base of the adapters.

        async with LiveFork(agent, place=workspace) as forks:
            ...

    The end of the block ends a fork that is still open: it is aborted. If the block is left by an
    exception or a cancellation, a fork in a durable store is stopped and can be resumed.
    """

    def __init__(
        self,
        *,
        codec: ConversationCodec,
        place: Workspace | Branch | None = None,
        judge: SingleJudge | Judge | None = None,
        model_judge: ModelJudge | None = None,
        confidence: Confidence | None = None,
        price: Price | None = None,
        deps: Any = None,
        **options: Any,
    ) -> None:
        """Prepares a conversation; nothing is forked yet.

        Args:
            codec: Knows the messages of the framework.
            place: The workspace or branch that the agent works in. Without it the branches fork
                conversations only.
            judge: A callable `judge(case)` or a whole Panel, for `merge_or_select("auto")`.
            model_judge: Makes a judge of the model that a fork's strategy names; used without a
                `judge`.
            confidence: How sure a judgement is.
            price: The price of a model by its name. Without it costs are unknown, and a budget in
                money refuses to run.
            deps: The parent's dependencies; branches find them as `branch.deps`.
            options: Of `ForkCoordinator`: max_branches, store, checkpoint_store, test_command, ….
        """
        single: Any = judge
        options["judge"] = (
            judge
            if isinstance(judge, Panel)
            else Panel(single, model_judge=model_judge, confidence=confidence)
        )
        self.price: Price = price or (lambda _: None)
        self._options = options
        self._seen_at: Path | None = getattr(place, "seen_at", None)
        coordinator = ForkCoordinator(
            None,
            deps,
            runner=lambda branch: _Runner(self, branch, coordinator),
            codec=codec,
            place=place,
            **options,
        )
        self.coordinator = coordinator
        """The coordinator of the parent's forks, for all that the tools do not offer."""
        files = RunFiles(coordinator.writable_path, seen_at=self._seen_at)
        self.parent = ForkingRun(self, lambda: coordinator, files)

    @abstractmethod
    async def run_branch(self, run: ForkingRun, prompt: str, history: History) -> RunOutcome:
        """Goes on from `history` with `prompt` in the run's branch, until the run ends."""

    @property
    def run_now(self) -> ForkingRun:
        """The run that calls: of a branch in everything that a branch's run does, else the
        parent's."""
        run = current_run.get()
        return run if run is not None and run.forks is self else self.parent

    @property
    def files(self) -> RunFiles:
        """Commands and files of the run that calls, for tools of your own."""
        return self.run_now.files

    def functions(self) -> list[Callable[..., Awaitable[Any]]]:
        """Returns the seven fork tools, and `run_command`, as functions that answer errors in
        words. Each acts on the run that calls it."""
        tools = [
            self._alone(tool) if tool.__name__ in SEQUENTIAL else tool
            for tool in ForkTools(_Current(self)).functions()
        ]
        return [*tools, answered(self.run_command)]

    async def run_command(self, command: str, timeout_seconds: float = COMMAND_SECONDS_MAX) -> str:
        """Run a shell command in the workspace. Returns its output and its exit code.

        Args:
            command: A line for the shell.
            timeout_seconds: It is killed after that many seconds.
        """
        done = await self.files.run(command, timeout=timeout_seconds)
        output = cut((done.stdout + done.stderr).decode("utf-8", "replace"), OUTPUT_CHARACTERS_MAX)
        killed = {"timeout": "killed at its time limit, ", "output": "killed: too much output, "}
        return f"{output}[{killed.get(done.how, '')}exit {done.exit_code}]"

    async def aclose(self) -> None:
        """Aborts an open fork and ends what the parent left running. May be called again."""
        try:
            await self.coordinator.aclose()
        finally:
            await self.parent.files.close()
            await self.coordinator.land()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self.coordinator.__aexit__(kind, error, traceback)
        finally:
            await self.parent.files.close()
            await self.coordinator.land()

    def _alone(self, tool: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @wraps(tool)
        async def call(*arguments: Any, **options: Any) -> Any:
            async with self.files.exclusive():
                return await tool(*arguments, **options)

        return call

    def _nested(self, branch: BranchRuntime, outer: ForkCoordinator) -> ForkCoordinator:
        if isinstance(branch.inner, ForkCoordinator):
            return branch.inner
        inner = outer.nested(
            branch.id,
            runner=lambda child: _Runner(self, child, inner),
            goal=branch.spec.steer,
            **self._options,
        )
        return inner


class _Current:
    """The run that calls, as the tools want it."""

    def __init__(self, forks: LiveFork) -> None:
        self._forks = forks

    @property
    def coordinator(self) -> ForkCoordinator:
        return self._forks.run_now.coordinator

    @property
    def branch(self) -> BranchRuntime | None:
        return self._forks.run_now.branch

    def history(self) -> list[Any]:
        copied: list[Any] = self._forks.coordinator.codec.copy(self._forks.run_now.messages)
        return copied

    def adopt(self, merged: MergeResult) -> None:
        self._forks.run_now.merged = merged


class _Runner:
    """Runs one branch, for all its turns."""

    can_pause = True

    def __init__(self, forks: LiveFork, branch: BranchRuntime, outer: ForkCoordinator) -> None:
        self._forks = forks
        files = RunFiles(
            lambda: branch.path, seen_at=branch.seen_at, environment=branch.environment
        )
        self.state = ForkingRun(forks, lambda: forks._nested(branch, outer), files, branch)

    async def run(self, prompt: str, history: History) -> RunOutcome:
        token = current_run.set(self.state)
        try:
            return await self._forks.run_branch(self.state, prompt, history)
        finally:
            current_run.reset(token)

    def steer(self, text: str) -> None:
        self.state.steered.append(text)

    async def stop(self) -> None:
        await self.state.files.close()


def _deps(branch: BranchRuntime) -> Any:
    clone = getattr(branch.deps, "clone_for_branch", None)
    return branch.deps if clone is None else clone(branch.isolation)


def as_text(answer: object) -> str:
    """Returns what a tool answered as text for a model, bounded."""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, BranchDiffReport):
        return cut(described_report(answer), DIFF_CHARACTERS_MAX)
    return to_json(answer).decode()
