"""A running branch of a fork: the interface for its runner, and its state for the coordinator.

A runner reads `spec`, `deps`, `path` and `environment`, and reports by `request`, `capture` and
`ask`. Use it in the event loop of the fork; only `request`, `charge` and `capture` may be called
from other threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from branching._threads import run_in_thread
from branching.agent.approvals import ApprovalRequest, Approvals
from branching.agent.budget import Ledger, Reservation
from branching.agent.external_edits import EditWatch
from branching.agent.pause import Pause
from branching.agent.protocols import (
    Answer,
    BranchRunner,
    ConversationCodec,
    History,
    InnerForks,
)
from branching.agent.types import (
    BranchCost,
    BranchIsolation,
    BranchSpec,
    BranchState,
    BranchStatus,
    Budget,
    Usage,
)
from branching.fs import Branch
from branching.fs.confined_dir import ConfinedDir

if TYPE_CHECKING:
    from branching.agent.branch_files import BranchFiles

FORK_VARIABLE = "BRANCHING_FORK"
"""In the environment of all that a branch's run starts: `<fork id>/<branch id>`, after those of the
branches around it. What outlives the run is found by it, and killed before the branch's files are
merged or dropped."""


def now() -> datetime:
    return datetime.now(timezone.utc)


class Meter:
    """One model request: says what it used."""

    def __init__(self) -> None:
        self.usage: Usage | None = None

    def used(self, usage: Usage) -> None:
        """The request was answered; `requests` counts as 1 if it is 0."""
        self.usage = replace(usage, requests=max(usage.requests, 1))


class BranchRuntime:
    """One branch of an open fork."""

    def __init__(
        self,
        branch_id: str,
        spec: BranchSpec,
        *,
        fork_id: str,
        codec: ConversationCodec,
        ledger: Ledger,
        isolation: BranchIsolation,
        history: History,
        branch: Branch | None = None,
        path: Path | None = None,
        base_path: Path | None = None,
        owner: tuple[int, int] = (0, 0),
        lineage: str = "",
        deps: Any = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.id = branch_id
        self.spec = spec
        self.fork_id = fork_id
        self.isolation = isolation
        self.deps = deps
        """Whatever the runner factory wants to keep here; the coordinator puts the parent's."""
        self.branch = branch
        """Its BranchFS branch; None where the files are shared."""
        self.path = path
        """The directory that it works in; None for a fork without files."""
        self.base_path = base_path
        """The files as they were at the fork."""
        self.owner = owner
        """Uid and gid of the workspace's owner."""
        self.lineage = f"{lineage} {fork_id}/{branch_id}".strip()
        """This branch, after those that it is nested in."""
        self.ledger = ledger
        self.runner: BranchRunner | None = None
        self.task: asyncio.Task[None] | None = None
        """Its current run."""
        self.history: History = history
        """Its conversation: what it was given, until its first run has ended."""
        self.partial_history: History | None = None
        """The conversation at the last model request; None before the first."""
        self.failure: Exception | None = None
        """What a failed run raised."""
        self.final_message = ""
        self.output: object = None
        self.inner: InnerForks | None = None
        """The coordinator of forks that this branch's run has made itself."""
        self.status = BranchStatus(
            id=branch_id, label=spec.label, state="running", last_activity_at=now()
        )
        self.approvals = Approvals(branch_id)
        self.pause = Pause()
        """For runners that wait for its end before each request (`can_pause`)."""
        self.test_pass_ratio: float | None = None
        self.ending: tuple[BranchState, str | None] | None = None
        """What it is being stopped for."""
        self.keeps: Callable[[], bool] = lambda: False
        """Whether its files are needed if the fork ends without it."""
        self.keep_patch: Callable[[int], None] = lambda _bytes_max: None
        """Saves what it has changed, up to so many bytes, before the fork ends without it."""
        self._edits: EditWatch | None = None
        self._codec = codec
        self._dumped: tuple[History, bytes] = (None, b"")
        self._on_change = on_change

    @property
    def seen_at(self) -> Path | None:
        """The path at which commands in every branch see its files; None without files."""
        return None if self.branch is None else self.branch.seen_at

    @property
    def environment(self) -> Mapping[str, str]:
        """To be set for every process that the run starts."""
        marked = {FORK_VARIABLE: self.lineage, "BRANCHING": "1"}
        if self.branch is not None:
            marked["BRANCHING_BRANCH"] = self.branch.name
        return marked

    @property
    def overlay(self) -> BranchFiles | None:
        """Its files, safely: no name or link in them leads out of the branch."""
        from branching.agent.branch_files import BranchFiles

        return None if self.branch is None else BranchFiles(self.branch, self.owner)

    @property
    def budget(self) -> Budget:
        return self.ledger.limits(self.id)

    @property
    def blocked_commands(self) -> tuple[str, ...]:
        return tuple(self.approvals.blocked)

    @property
    def cost_tracker(self) -> Usage:
        """What it has used so far."""
        return self.ledger.spent(self.id)

    @property
    def is_running(self) -> bool:
        return self.status.state == "running"

    @contextmanager
    def request(self, expected: Usage | None = None, *, is_priced: bool = True) -> Iterator[Meter]:
        """Reserves one model request for the length of the `with`. Report the usage by `used`.

        Without a report, a request that raises counts as nothing, and one that returns counts as
        the expected usage.

        Raises:
            BudgetExhausted: The budget does not allow the request. It must not be sent.
        """
        reservation = self.reserve(expected, is_priced=is_priced)
        meter = Meter()
        try:
            yield meter
        except BaseException:
            reservation.settle(meter.usage or Usage())
            raise
        reservation.settle(meter.usage or reservation.expected)

    def reserve(self, expected: Usage | None = None, *, is_priced: bool = True) -> Reservation:
        """Reserves one model request without a `with`. The caller must settle it."""
        return self.ledger.reserve(self.id, expected, is_priced=is_priced)

    def charge(self, used: Usage) -> None:
        """Adds usage that a program has reported.

        Raises:
            BudgetExhausted: The budget is used up. The usage is counted nevertheless.
        """
        try:
            self.ledger.charge(self.id, used)
        finally:
            self._on_change()

    def capture(self, history: History) -> None:
        """Keeps a copy of the conversation as it is sent, without the tool call that is running.

        If the codec has `copy_after`, only new or changed messages are copied. A deep copy of a
        long conversation at each request would block the event loop.
        """
        copy_after = getattr(self._codec, "copy_after", None)
        if copy_after is None:
            self.partial_history = self._codec.copy(history)
        else:
            earlier = self.history if self.partial_history is None else self.partial_history
            self.partial_history = copy_after(history, earlier)
        self.touch()
        self._on_change()

    async def ask(self, tool: str, arguments: str = "", **facts: Any) -> Answer:
        """Suspends the run until the request is approved or denied. A denial is recorded."""
        return await self.approvals.ask(
            ApprovalRequest(tool=tool, arguments=arguments, facts=facts)
        )

    async def mark_own_edits(self) -> None:
        """What the branch's files are now is the run's own work. After each step of the run."""
        if (watch := self._watch()) is not None:
            await run_in_thread(watch.mark)

    async def edits_of_others(self) -> list[str]:
        """Returns the paths that others have changed since the last mark, and sets a new mark.

        Call it before each request. `edits.told` returns a text about them for the model. Empty for
        a branch without files.
        """
        watch = self._watch()
        return [] if watch is None else await run_in_thread(watch.edits)

    def _watch(self) -> EditWatch | None:
        if self.branch is None or self.base_path is None:
            return None
        if self._edits is None:
            base, tree = (
                ConfinedDir(self.base_path, self.owner),
                ConfinedDir(self.branch.path, self.owner),
            )
            self._edits = EditWatch(self.branch, base, tree)
        return self._edits

    def current_history(self) -> History | None:
        """Returns what the branch would bring the parent: None if it has said nothing yet."""
        return self.history if self.status.state == "done" else self.partial_history

    def dumped_history(self) -> bytes:
        """Returns `current_history` as bytes; dumped once for each conversation."""
        history = self.current_history()
        if history is not self._dumped[0]:
            self._dumped = (history, self._codec.dump(history))
        return self._dumped[1]

    def touch(self, **changed: Any) -> None:
        """Brings the status up to date."""
        self.status = replace(self.status, last_activity_at=now(), **changed)
        history = self.current_history() or self.history
        self.status = replace(
            self.status,
            current_turn=self._codec.turns(history),
            last_message_preview=self._codec.preview(history),
        )

    def begin_anew(self, branch: Branch | None) -> None:
        """What its runs came to is forgotten, but for what they have spent."""
        self.branch = branch
        self.partial_history = None
        self.failure = None
        self.output, self.final_message, self.test_pass_ratio = None, "", None
        self._edits = None
        self._dumped = (None, b"")

    def cost(self) -> BranchCost:
        spent, cap = self.cost_tracker, self.budget.usd
        left = None if cap is None or spent.usd is None else max(cap - spent.usd, 0.0)
        return BranchCost(
            branch_id=self.id,
            branch_label=self.spec.label,
            cumulative_usd=spent.usd,
            budget_usd=cap,
            remaining_usd=left,
            state=self.status.state,
            tokens=spent.tokens,
            requests=spent.requests,
        )


RunnerFactory = Callable[[BranchRuntime], BranchRunner]

RUNNER_METHODS = ("run", "steer", "stop")
"""Of a `BranchRunner`."""


def make_runner(factory: RunnerFactory, branch: BranchRuntime) -> BranchRunner:
    """Returns the runner that the factory makes for a branch.

    Raises:
        TypeError: The factory returned an object without the methods of a `BranchRunner`.
    """
    runner = factory(branch)
    missing = [each for each in RUNNER_METHODS if not callable(getattr(runner, each, None))]
    if missing:
        raise TypeError(
            f"runner returned {runner!r} for branch {branch.spec.label!r}, "
            f"which has no method {' or '.join(missing)}: see BranchRunner"
        )
    return runner


class Tester(Protocol):
    """Runs a branch's tests."""

    async def __call__(self, branch: BranchRuntime) -> float | None:
        """Returns the share that passed, from 0 to 1; None if they could not be run."""
