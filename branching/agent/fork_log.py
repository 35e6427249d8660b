"""Writes a program's forks to the run log of the workspace.

`branching log` and `branching watch` read them there.

The entry of a branch has its state, cost and output. Another process can stop a run, send it a
message, pause it before its next model request if its runner supports that (a program pauses
immediately), and keep its branch at the end of the fork.

Use it in the event loop of the fork. Only requests from other processes arrive in another thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from branching._threads import QueueThread, run_in_loop, start_in_loop
from branching.agent.branch_runtime import BranchRuntime
from branching.agent.coordinator import ForkCoordinator
from branching.errors import BranchError
from branching.fs import Branch, Workspace
from branching.runlog.events import Event, EventKind, OnEvent
from branching.runlog.patches import WHOLE_PATCH_BYTES_MAX
from branching.runlog.run_controller import RunController
from branching.runlog.run_log import RunLog

if TYPE_CHECKING:
    from branching.process import Ended

ANSWER_SECONDS_MAX = 10.0
"""How long a request from another process waits for the event loop."""
CLOSING_SECONDS_MAX = 10.0
"""A disk that hangs must not keep a program from ending."""


class ForkLog:
    """Writes down the forks of one coordinator, for the length of a `with`."""

    def __init__(
        self,
        coordinator: ForkCoordinator,
        space: Workspace,
        command: str,
        on_event: OnEvent = lambda _: None,
        *,
        is_behind: bool = False,
    ) -> None:
        """Creates the log.

        Args:
            on_event: Receives all logged events, output in blocks of whole lines.
            is_behind: Log and call `on_event` in a thread, so that the event loop does not wait
                for the disk.
        """
        self._coordinator = coordinator
        self._run_log = RunLog.of(space, command, keeps_store=True)
        listener = self._run_log.and_then(on_event)
        self._behind = QueueThread("fork log") if is_behind else None
        self._listen = listener
        self._states: dict[str, tuple[str, float | None]] = {}
        self._partial: dict[str, str] = {}
        self._controlled: dict[str, ExitStack] = {}
        self._won: set[str] = set()
        self._began: dict[str, float] = {}  # of running runs

    @property
    def controller(self) -> RunController:
        """Through which the runs are steered."""
        return self._run_log.controller

    @property
    def branches(self) -> list[str]:
        """Names of the branches that were written down."""
        return self._run_log.branches

    @property
    def patched(self) -> list[str]:
        """The branches whose patch was saved."""
        return self._run_log.patched

    def heard(self, branch_id: str, text: str) -> None:
        """Takes a piece of what a branch says."""
        *lines, rest = (self._partial.get(branch_id, "") + text).split("\n")
        branch = self._coordinator.branches.get(branch_id)
        if branch is None or branch.branch is None:
            self._partial[branch_id] = "\n".join([*lines, rest])  # it is just being made
            return
        if branch_id not in self._states:
            self.notice()  # all, in their order: which of them speaks first says nothing
        self._partial[branch_id] = rest
        if lines:
            self._tell("output", branch, text="\n".join(lines))

    def keep_patch(self, branch: Branch) -> None:
        """Keeps what a branch that was noticed changed, before it is merged. It blocks."""
        self._run_log.keep_patch(branch, WHOLE_PATCH_BYTES_MAX)

    def notice(self) -> None:
        """Writes down what has changed since the last time. To be called now and then."""
        for branch in self._coordinator.branches.values():
            if branch.branch is not None:
                self._notice(branch)
        merged = self._coordinator.last_merge
        winner = merged and self._coordinator.branches.get(merged.winner_branch_id)
        if winner and winner.id in self._states and winner.id not in self._won:
            self._won.add(winner.id)
            self._tell("committed", winner, state="won")

    def _notice(self, branch: BranchRuntime) -> None:
        state, cost = _state(branch), branch.cost_tracker.usd
        before = self._states.get(branch.id)
        if before == (state, cost):
            return
        self._states[branch.id] = (state, cost)
        if before is None:
            # A resumed fork that has ended was logged at its time.
            self._tell("started" if branch.task is not None else "resumed", branch)
            opened = branch.branch
            assert opened is not None, "only branches with files are logged"
            branch.keeps = partial(self.controller.keeps, opened.name)
            branch.keep_patch = partial(self._run_log.keep_patch, opened)
        if branch.is_running:
            self._began.setdefault(branch.id, time.time())
            self._steer(branch)
            self._tell("spent", branch, state=state, cost_usd=cost)
            return
        if rest := self._partial.pop(branch.id, ""):
            self._tell("output", branch, text=rest)
        if branch.id in self._controlled:
            self._controlled.pop(branch.id).close()
        told = branch.status.error or ""
        ended_at = branch.status.last_activity_at.timestamp()
        seconds = max(0.0, ended_at - self._began.pop(branch.id, ended_at))
        ended: Ended | None = getattr(branch.runner, "ended", None)
        used = {
            "cpu_seconds": None if ended is None else ended.cpu_seconds,
            "memory_peak_bytes": None if ended is None else ended.memory_peak,
        }
        self._tell(
            "finished", branch, state=state, cost_usd=cost, seconds=seconds, text=told, **used
        )

    def _steer(self, branch: BranchRuntime) -> None:
        if branch.id not in self._controlled and branch.branch is not None:
            run = _Run(self._coordinator, branch, asyncio.get_running_loop())
            self._controlled[branch.id] = stack = ExitStack()
            stack.enter_context(
                self._run_log.controller.controlling(branch.branch.name, run, None, tell=run.tell)
            )

    def _tell(self, kind: EventKind, branch: BranchRuntime, **facts: Any) -> None:
        assert branch.branch is not None, "only branches with files are logged"
        number = list(self._coordinator.branches).index(branch.id)
        label = f"{branch.spec.label}: {branch.spec.steer}"
        name = branch.branch.name
        event = Event(kind=kind, index=number, branch=name, label=label, **facts)
        if self._behind is None:
            self._listen(event)
        else:
            self._behind.put(lambda: self._listen(event))

    def __enter__(self) -> ForkLog:
        self._run_log.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for stack in self._controlled.values():
            stack.close()
        if self._behind is not None:
            self._behind.close(CLOSING_SECONDS_MAX)
        self._run_log.__exit__(kind, error, traceback)


def _state(branch: BranchRuntime) -> str:
    return "paused" if branch.is_running and branch.pause.is_on else branch.status.state


class _Run:
    """A branch's run, as it is reached from another thread."""

    def __init__(
        self,
        coordinator: ForkCoordinator,
        branch: BranchRuntime,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._coordinator = coordinator
        self._branch = branch
        self._loop = loop

    def kill(self, grace_seconds: float = 0.0) -> None:  # noqa: ARG002  (a run ends immediately)
        start_in_loop(self._loop, self._coordinator.terminate_branch(self._branch.id))

    def pause(self, *, is_on: bool = True) -> None:
        if not getattr(self._branch.runner, "can_pause", False):
            name = self._branch.spec.label
            raise BranchError(f"the runner of {name} cannot pause it; it can be stopped")

        async def pause() -> None:
            (self._branch.pause.begin if is_on else self._branch.pause.end)()

        self._await(pause())

    def tell(self, text: str) -> None:
        async def steer() -> None:
            self._coordinator.steer(self._branch.id, text)

        self._await(steer())

    def _await(self, step: Coroutine[Any, Any, None]) -> None:
        try:
            run_in_loop(self._loop, step, seconds_max=ANSWER_SECONDS_MAX)
        except TimeoutError as error:
            raise BranchError("the program that runs it does not answer") from error
