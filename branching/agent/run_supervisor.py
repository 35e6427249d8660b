"""Supervises runs: starts, times and stops them, and records their state.

A run ends normally (done), by an exception (failed), by a budget, or because it is stopped. In the
last case `ending` has the reason. Use it in the event loop of the fork.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import nullcontext

from branching._threads import run_in_thread
from branching.agent.branch_runtime import FORK_VARIABLE, BranchRuntime
from branching.agent.errors import BudgetExhausted
from branching.agent.fork import Fork
from branching.agent.process_cleanup import kill_marked
from branching.agent.protocols import History, RunOutcome
from branching.agent.types import BranchState
from branching.errors import BranchingError

CAUSES_MAX = 20
"""So many exceptions deep a refusal is looked for below what a framework made of it."""


class RunSupervisor:
    """Attends the runs of one fork."""

    def __init__(self, fork: Fork, on_state: Callable[[], None]) -> None:
        self._fork = fork
        self._on_state = on_state
        self._loop = asyncio.get_running_loop()
        self._stopping: set[asyncio.Task[None]] = set()
        seconds = fork.ledger.total.seconds
        self._timer = seconds and self._loop.call_later(
            seconds, self._out_of_total, f"the fork reached its time limit of {seconds:g} seconds"
        )

    def start(self, branch: BranchRuntime, prompt: str) -> asyncio.Task[None]:
        """Starts a run; the branch is running when this returns."""
        history = branch.current_history() or branch.history
        if branch.task is not None:
            branch.partial_history = history  # an earlier turn is not lost when this one is stopped
        branch.ending = None
        branch.pause.end()
        branch.touch(state="running", error=None)
        branch.task = asyncio.create_task(
            self._supervise(branch, prompt, history), name=f"branch {branch.spec.label}"
        )
        self._on_state()
        return branch.task

    async def stop(
        self, branch: BranchRuntime, state: BranchState = "terminated", reason: str | None = None
    ) -> None:
        """Stops a run and all that it started. One that does not run is left as it is."""
        task = branch.task
        if not branch.is_running or task is None:
            return
        branch.ending = branch.ending or (state, reason)
        try:
            if branch.runner is not None:
                await branch.runner.stop()
        except Exception as error:
            branch.ending = (branch.ending[0], f"{branch.ending[1] or ''} (stop: {error})".strip())
        finally:
            task.cancel()
        if task is not asyncio.current_task():
            await asyncio.wait({task})
            if branch.is_running:  # it was cancelled before its first step
                self._end(branch, *branch.ending)

    async def stop_all(
        self, branches: Iterable[BranchRuntime], state: BranchState = "terminated"
    ) -> None:
        await asyncio.gather(*(self.stop(branch, state) for branch in branches))

    async def kill_all(self) -> None:
        """Kills what the runs have left behind. BranchError if something does not die."""
        await run_in_thread(lambda: kill_marked(FORK_VARIABLE, f"{self._fork.fork_id}/"))

    def notice_spending(self) -> None:
        """Stops all branches when they have used more than the fork may."""
        if self._fork.ledger.is_overrun():
            self._out_of_total("the branches have used more than the fork's budget")

    def close(self) -> None:
        if self._timer:
            self._timer.cancel()

    def _out_of_total(self, reason: str) -> None:
        spent, total = self._fork.ledger.spent(), self._fork.ledger.total
        if total.usd is not None:
            reason += f" (spent ${spent.usd or 0.0:.4f} of ${total.usd:.4f})"
        for branch in self._fork.branches.values():
            if branch.is_running and branch.ending is None:
                self._stop_later(branch, "aggregate_budget_exhausted", reason)

    def _stop_later(self, branch: BranchRuntime, state: BranchState, reason: str) -> None:
        branch.ending = (state, reason)
        stopping = self._loop.create_task(self.stop(branch, state, reason))
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopping.discard)

    async def _supervise(self, branch: BranchRuntime, prompt: str, history: History) -> None:
        assert branch.runner is not None, "a branch is started after its runner is made"
        seconds = branch.budget.seconds
        reason = f"branch {branch.id} reached its time limit of {seconds or 0:g} seconds"
        timer = seconds and self._loop.call_later(
            seconds, self._stop_later, branch, "budget_exhausted", reason
        )
        try:
            # The run may change what it is given; the branch keeps the original.
            own = await run_in_thread(lambda: self._fork.codec.copy(history))
            with nullcontext() if branch.branch is None else branch.branch.in_use():
                outcome = await branch.runner.run(prompt, own)
        except asyncio.CancelledError:
            state, told = branch.ending or ("terminated", None)
            is_ours = branch.ending is not None
            if not is_ours:  # the program ends: a sandbox left running keeps its mount busy
                await self._stop_runner(branch)
            self._end(branch, state, told)
            if not is_ours:
                raise
        except Exception as error:
            self._failed(branch, error)
        else:
            self._succeeded(branch, outcome)
        finally:
            if timer:
                timer.cancel()

    async def _stop_runner(self, branch: BranchRuntime) -> None:
        try:
            if branch.runner is not None:
                await branch.runner.stop()
        except Exception as error:
            branch.touch(error=f"what the run started was not stopped: {error}")

    def _succeeded(self, branch: BranchRuntime, outcome: RunOutcome) -> None:
        branch.output = outcome.output
        branch.final_message = outcome.final_message
        if branch.ending is not None:
            branch.partial_history = outcome.history  # it came to its end while it was stopped
            self._end(branch, *branch.ending)
            return
        branch.history = outcome.history
        self._end(branch, "done", None)

    def _failed(self, branch: BranchRuntime, error: Exception) -> None:
        if branch.ending is not None:
            self._end(branch, *branch.ending)
            return
        refusal = _refusal(error)
        if refusal is None:
            branch.failure = error
            ours = isinstance(error, BranchingError)  # these speak for themselves
            self._end(branch, "failed", f"{'' if ours else type(error).__name__ + ': '}{error}")
        elif refusal.scope == "branch":
            self._end(branch, "budget_exhausted", refusal.message)
        else:
            self._end(branch, "aggregate_budget_exhausted", refusal.message)
            for other in self._fork.branches.values():
                if other.is_running and other.ending is None:
                    self._stop_later(other, "aggregate_budget_exhausted", refusal.message)

    def _end(self, branch: BranchRuntime, state: BranchState, error: str | None) -> None:
        branch.touch(state=state, error=error)
        try:
            self._on_state()
        except Exception as failure:
            # The run has ended whatever becomes of the record of it.
            branch.touch(error=f"{error or ''} (its state was not saved: {failure})".strip())


def _refusal(error: BaseException | None) -> BudgetExhausted | None:
    for _ in range(CAUSES_MAX):
        if error is None or isinstance(error, BudgetExhausted):
            return error
        error = error.__cause__ or error.__context__
    return None
