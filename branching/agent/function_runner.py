"""A plain coroutine function as the runner of branches: for frameworks without an adapter."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from branching.agent.branch_runtime import BranchRuntime, RunnerFactory
from branching.agent.errors import ForkStateError
from branching.agent.protocols import History, RunOutcome

Work = Callable[[BranchRuntime, str, History], Awaitable[RunOutcome | str]]
"""Called with the branch, the prompt and the conversation so far."""


def callable_runner(work: Work) -> RunnerFactory:
    """Returns a runner factory that calls a coroutine function for each turn of a branch.

    A run can be cancelled, and processes that it started with `branch.environment` are killed when
    the branch is stopped. It cannot receive messages while it runs.

    Args:
        work: Works in `branch.path` and returns a `RunOutcome`, or a text: then the conversation
            gets the prompt and the text as two messages `{"role": …, "content": …}`.
    """
    return lambda branch: _CallableRunner(work, branch)


class _CallableRunner:
    def __init__(self, work: Work, branch: BranchRuntime) -> None:
        self._work = work
        self._branch = branch

    async def run(self, prompt: str, history: History) -> RunOutcome:
        asked = [*(history or []), {"role": "user", "content": prompt}]
        self._branch.capture(asked)
        result = await self._work(self._branch, prompt, history)
        if isinstance(result, RunOutcome):
            return result
        answered = [*asked, {"role": "assistant", "content": result}]
        return RunOutcome(history=answered, output=result, final_message=result)

    def steer(self, text: str) -> None:  # noqa: ARG002
        raise ForkStateError("this run cannot receive messages before it ends")

    async def stop(self) -> None:
        """Nothing: the task is cancelled, and marked processes are killed, by the coordinator."""
