"""An agent's run as a candidate of a pattern.

    outcome = BestOfN(agent_candidate(agent, "Make the tests pass"), n=3, evaluate=count)(workspace)

The run works in the candidate's branch, in its sandbox; its output is the candidate's value. It
succeeds when it ends normally, or when `success(result)` is true. It ends when it is cancelled.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_ai import Agent, AgentRunResult, RunContext
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.usage import UsageLimits

from branching._threads import call_soon
from branching.agent.pause import Pause
from branching.agent.pydantic_ai.workspace import BranchWorkspace
from branching.agent.sandbox import BranchSandbox
from branching.errors import ProcessBranchError
from branching.patterns.attempt import Task
from branching.patterns.results import CandidateResult
from branching.runlog.run_controller import RunController

Prompt = str | Callable[..., str]


@dataclass
class AgentCandidate:
    """A candidate that runs an agent; `prompt` may be made from what the pattern hands it."""

    agent: Agent[Any, Any]
    prompt: Prompt
    success: Callable[[AgentRunResult[Any]], bool] | None = None
    score: Callable[[AgentRunResult[Any]], float] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    ends_when_cancelled = True

    def __call__(self, path: Path, *arguments: Any) -> CandidateResult:
        task = Task.of_caller()
        seen_at = None if task is None else task.attempt.branch.seen_at
        sandbox = BranchSandbox(Path(path), seen_at=seen_at)
        hook = _Ear()
        run = _Run(self._coroutine(sandbox, self._prompt(path, arguments), hook), hook)
        controller = RunController.current()
        if task is not None:
            task.on_cancel(run.cancel)
        try:
            with ExitStack() as stack:
                if task is not None and controller is not None:
                    name = task.attempt.branch.name
                    stack.enter_context(controller.controlling(name, run, None, tell=run.tell))
                result = run()
        finally:
            if task is not None:
                task.forget(run.cancel)
            sandbox.close()
        is_success = True if self.success is None else bool(self.success(result))
        return CandidateResult(
            success=is_success,
            value=result.output,
            score=None if self.score is None else self.score(result),
            error="" if is_success else str(result.output),
        )

    def _prompt(self, path: Path, arguments: tuple[Any, ...]) -> str:
        return self.prompt if isinstance(self.prompt, str) else self.prompt(path, *arguments)

    async def _coroutine(
        self, sandbox: BranchSandbox, prompt: str, hook: _Ear
    ) -> AgentRunResult[Any]:
        options = {"usage_limits": UsageLimits(), **self.options}
        options["capabilities"] = [*(options.get("capabilities") or ()), hook]
        return await self.agent.run(prompt, workspace=BranchWorkspace(sandbox), **options)


def agent_candidate(
    agent: Agent[Any, Any],
    prompt: Prompt,
    *,
    success: Callable[[AgentRunResult[Any]], bool] | None = None,
    score: Callable[[AgentRunResult[Any]], float] | None = None,
    **options: Any,
) -> AgentCandidate:
    """Returns a run of the agent as a candidate for any pattern.

    `prompt` is a text, or is called with what the pattern hands its candidates: the path, and the
    attempt or the feedback. `success` and `score` judge the run's result. `options` go to
    `agent.run`: model, deps, usage_limits, and so on.
    """
    return AgentCandidate(agent, prompt, success, score, options)


class _Ear(AbstractCapability[Any]):
    """Delivers messages to a run, and pauses it."""

    def __init__(self) -> None:
        self.pause = Pause()
        self._untold: list[str] = []

    def tell(self, text: str) -> None:
        """Puts it into the conversation before the next request."""
        self._untold.append(text)

    async def before_node_run(self, ctx: RunContext[Any], *, node: Any) -> Any:
        if Agent.is_model_request_node(node):
            await self.pause.over()
            while self._untold:
                ctx.enqueue(self._untold.pop(0))
        return node


class _Run:
    """A coroutine in the event loop of all agents. This thread waits for it, and can cancel it,
    pause it and send it messages."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], hook: _Ear) -> None:
        self._coroutine = coroutine
        self._hook = hook
        self._loop = _loop()
        self._ended = threading.Event()
        self._lock = threading.Lock()  # guards the next two
        self._task: asyncio.Task[Any] | None = None
        self._is_cancelled = False

    def __call__(self) -> Any:
        """Returns when the run has really ended, also when it was cancelled."""
        call_soon(self._loop, self._start)
        self._ended.wait()
        assert self._task is not None, "it has ended"
        if self._task.cancelled():
            raise ProcessBranchError("the agent's run was cancelled")
        return self._task.result()

    def _start(self) -> None:
        with self._lock:
            self._task = self._loop.create_task(self._coroutine)
            self._task.add_done_callback(lambda _: self._ended.set())
            if self._is_cancelled:
                self._task.cancel()

    def cancel(self, grace_seconds: float = 0.0) -> None:  # noqa: ARG002
        """Ends the run at its next await."""
        with self._lock:
            self._is_cancelled = True
            if self._task is not None:
                call_soon(self._loop, self._task.cancel)

    kill = cancel

    def pause(self, *, is_on: bool = True) -> None:
        """Pauses the run before its next request, or resumes it."""
        pause = self._hook.pause
        call_soon(self._loop, pause.begin if is_on else pause.end)

    def tell(self, text: str) -> None:
        """Says something to the run, before its next request."""
        call_soon(self._loop, self._hook.tell, text)


_starting = threading.Lock()
_running: asyncio.AbstractEventLoop | None = None


def _loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop that the candidates' agents run in, for as long as the program runs.

    It is one for all of them, because they may share a model: its HTTP client keeps connections,
    and these belong to the loop that opened them.
    """
    global _running  # noqa: PLW0603
    with _starting:
        if _running is None:
            _running = asyncio.new_event_loop()
            threading.Thread(target=_running.run_forever, name="agents", daemon=True).start()
        return _running
