"""The coordinator: all that a front end can do with a fork. See the package for the whole picture.

    ForkView        what can be asked                               (`queries`)
    ForkRuns        what can be done to the run of one branch       (`run_control`)
    Resolver        choosing a winner by a judge                    (`resolver`)
    here            how a fork begins and ends: fork, merge, override, rewind, abort, resume

Whatever changes the fork takes one lock, so the calls of a front end, a tool and a timer follow
one another. The lock is not held while a run is awaited: a merge waits for its winner first, and
looks again afterwards. All methods belong to one event loop.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from branching._threads import run_in_thread
from branching.agent.branch_runtime import (
    FORK_VARIABLE,
    BranchRuntime,
    RunnerFactory,
    Tester,
    make_runner,
)
from branching.agent.budget import Ledger, UnknownPrice
from branching.agent.checkpoint import REWINDING
from branching.agent.checkpoint_manager import CheckpointManager
from branching.agent.errors import ForkBranchLimitError, ForkDepthLimitError, ForkStateError
from branching.agent.fork import Fork, check_specs, new_fork_id
from branching.agent.fork_session import ForkSession
from branching.agent.fork_store import InMemoryForkStateStore
from branching.agent.json_codec import JsonCodec
from branching.agent.kept_patches import keep_patches
from branching.agent.merge_override import Override
from branching.agent.parent_workspace import ParentWorkspace
from branching.agent.project_tests import TIMEOUT_SECONDS, BranchTester
from branching.agent.protocols import (
    CheckpointStore,
    ConversationCodec,
    ForkStateStore,
    History,
    Judge,
    Judgement,
)
from branching.agent.resolver import Resolver
from branching.agent.resume import place_of, take_up
from branching.agent.run_control import ForkRuns
from branching.agent.types import (
    BranchIsolation,
    BranchSpec,
    Budget,
    FlushReport,
    ForkHandle,
    MergeOptions,
    MergeResult,
    MergeStrategy,
)
from branching.errors import BranchingError, ConflictError, add_note
from branching.fs import Branch, Workspace

CANCELLATIONS_MAX = 5
"""So often the end of an interrupted fork is begun again after it was cancelled."""


class ForkCoordinator(ForkRuns, Resolver):
    """Forks one parent run, one fork at a time, and merges or drops what comes of it."""

    def __init__(
        self,
        agent: Any = None,
        parent_deps: Any = None,
        *,
        runner: RunnerFactory,
        codec: ConversationCodec | None = None,
        place: Workspace | Branch | None = None,
        depth: int = 0,
        goal: str = "",
        max_branches: int = 10,
        max_depth: int = 2,
        store: ForkStateStore | None = None,
        checkpoint_store: CheckpointStore | None = None,
        aggregate_budget_usd: float | None = None,
        unknown_price: UnknownPrice = "refuse",
        keep_artifacts: bool = False,
        materializer_root: Path | None = None,
        judge: Judge | None = None,
        tester: Tester | None = None,
        test_command: str | Sequence[str] | None = None,
        test_timeout_s: float = TIMEOUT_SECONDS,
        outer: BranchRuntime | None = None,
    ) -> None:
        """Creates a coordinator for one parent run.

        `place` is the workspace or branch to fork; None forks conversations only. `agent` and
        `parent_deps` are passed through: each branch has `parent_deps` as its `deps`. The default
        of `checkpoint_store` is that of `parent_deps`, if it has one. `outer` is the branch whose
        run forks, for nested forks.

        `materializer_root` is the directory of a mirror of the branches' files for editors. Without
        it there is no mirror, unless `keep_artifacts` is set. The mirror is then in the workspace's
        base directory, in `.pydantic-deep/forks`, and stays after the fork.

        `test_command` runs in each branch before a judge decides, for at most `test_timeout_s`
        seconds; "auto" detects the project's test command.

        Raises:
            TypeError: The runner is not callable.
            ValueError: Both `test_command` and `tester` are given.
        """
        if not callable(runner):
            raise TypeError(f"runner must be callable with a branch, not {runner!r}")
        if test_command is not None:
            if tester is not None:
                raise ValueError("test_command and tester exclude each other")
            tester = BranchTester(test_command, timeout=test_timeout_s)
        self.agent = agent
        self.parent_deps = parent_deps
        self.goal = goal
        self.depth = depth
        self.max_branches = max_branches
        self.max_depth = max_depth
        self.keep_artifacts = keep_artifacts
        self.judge = judge
        self.tester = tester
        self.codec = codec or JsonCodec()
        self.store = store or InMemoryForkStateStore()
        checkpoints = checkpoint_store or getattr(parent_deps, "checkpoint_store", None)
        self.checkpoint_manager = CheckpointManager(checkpoints, self.codec)
        self.last_merge: MergeResult | None = None
        """What was merged last; after `resume` also a merge that the dead process had decided,
        without its paths."""
        self.judged: dict[str, Judgement] = {}
        """Answers of judges in this fork, by strategy: asked once."""
        self._runner = runner
        self._place = None if place is None else ParentWorkspace(place)
        self._aggregate_usd = aggregate_budget_usd
        self._unknown_price: UnknownPrice = unknown_price
        self._mirror_root = materializer_root
        self._outer = outer
        self._overridable: ForkSession | None = None
        self._lock = asyncio.Lock()

    async def fork(
        self,
        specs: Sequence[BranchSpec],
        *,
        parent_history: History = None,
        isolation: BranchIsolation | None = None,
        strategy: MergeStrategy | None = None,
        aggregate_budget_usd: float | None = None,
        aggregate_budget: Budget | None = None,
        about: dict[str, Any] | None = None,
    ) -> ForkHandle:
        """Forks the parent: all branches run when this returns. `about`, which JSON can hold, is
        kept with the fork's state.

        Raises ValueError for specs that are none, ForkBranchLimitError, ForkDepthLimitError,
        ForkStateError while a fork is open or a rewind is half done, TypeError for a runner
        without the methods of a `BranchRunner`, and what making branches raises; then there is no
        branch, and the parent is not frozen.
        """
        check_specs(specs)
        if self.checkpoint_manager.store is None:
            warnings.warn("there is no checkpoint store: this fork cannot be rewound", stacklevel=2)
        async with self._lock:
            self._check_limits(specs)
            await self._check_files()
            total = aggregate_budget or Budget()
            usd = self._aggregate_usd if aggregate_budget_usd is None else aggregate_budget_usd
            total = Budget(
                usd=total.usd if usd is None else usd,
                tokens=total.tokens,
                requests=total.requests,
                seconds=total.seconds,
            )
            around = None if self._outer is None else (self._outer.ledger, self._outer.id)
            fork = Fork(
                fork_id=new_fork_id(),
                codec=self.codec,
                ledger=Ledger(total, unknown_price=self._unknown_price, outer=around),
                isolation=isolation or BranchIsolation(),
                strategy=strategy or MergeStrategy(),
                parent_history=self.codec.copy([] if parent_history is None else parent_history),
                place=self._place,
                depth=self.depth,
                lineage=self._lineage(),
                about=about or {},
            )
            session = self._new_session(fork)

            def add() -> None:
                for number, spec in enumerate(specs):
                    branch_id = f"{fork.fork_id}-{number}"
                    fork.ledger.open(branch_id, spec.limits)
                    fork.add(branch_id, spec, deps=self.parent_deps, on_change=session.changed)

            await run_in_thread(add)  # it copies the conversation for each branch
            await session.make(self.checkpoint_manager, self._runner)
            return self._begin(session)

    async def merge_or_select(
        self, action: str, options: MergeOptions | None = None, *, is_automatic: bool = False
    ) -> MergeResult:
        """`pick:<branch id>` waits for that branch, stops the others, and merges its files.

        A winner that was stopped brings the conversation as it was at its last request. ValueError
        for another action or an unknown branch; ForkStateError if it failed or has said nothing;
        MergeConflictError; what a commit raises. The fork is open then, the winner as it was.
        An automatic merge can be overridden.
        """
        kind, _, branch_id = action.partition(":")
        if kind != "pick":
            raise ValueError(f"unknown action {action!r}; use pick:<branch id>")
        options = options or MergeOptions()
        winner = self._known(branch_id)
        self._open()
        if winner.task is not None:
            await asyncio.wait({winner.task})
        async with self._lock:
            session = self._open()
            fork = session.fork
            if fork.branches.get(branch_id) is not winner or winner.is_running:
                raise ForkStateError(f"branch {branch_id} runs again, or its fork is over")
            history = _winning_history(winner)
            await session.check_conflicts(winner, options)
            await session.quiet()
            report = await session.merge(winner, options, is_automatic=is_automatic)
            if is_automatic and (winner.branch is None or session.override is not None):
                self._overridable = session
            try:
                merged = await self._merged(winner, history, report)
            finally:
                await session.finish()
        if not is_automatic:  # which can be overridden until the run ends
            await self.land()
        return merged

    async def override(self, branch_id: str) -> MergeResult:
        """Reverts the last automatic merge and merges another branch of the same fork instead.

        Raises:
            ForkStateError: There is no such merge, or a fork is open. Nothing was changed.
            ConflictError: The files have been changed since. Nothing was changed.
        """
        async with self._lock:
            if not self.is_resolved or self._overridable is None:
                raise ForkStateError("there is no automatic merge to override")
            session, branch = self._overridable, self._known(branch_id)
            if branch_id == session.fork.winner:
                raise ForkStateError(f"branch {branch_id} is the merged branch")
            history, override = _winning_history(branch), session.override
            report = FlushReport()
            if override is not None:
                report = await run_in_thread(lambda: override.take(branch_id))
            merged = await self._merged(branch, history, report)
            self._forget_override()
            return merged

    async def rewind(self, checkpoint_id: str, *, history: History = None) -> History:
        """Brings conversation and files back to a checkpoint; returns the conversation.

        What is given up is kept as a checkpoint itself, with `history` as its conversation, or the
        one of the last merge or fork. ValueError for an unknown checkpoint, ForkStateError while a
        fork is open, and what restoring files raises; nothing has changed then.
        """
        async with self._lock:
            if not self.is_resolved:
                raise ForkStateError("a fork is open: merge or abort it first")
            self._forget_override()
            if history is None and self.last_merge is not None:
                history = self.last_merge.history_after_merge
            elif history is None:
                history = [] if self._fork is None else self._fork.parent_history

            return await run_in_thread(
                lambda: self.checkpoint_manager.rewind(checkpoint_id, history, self._place)
            )

    async def cut_off_rewind(self) -> str | None:
        """Returns the id of the checkpoint of an interrupted rewind, whose files may be incomplete.

        `rewind` to this or another checkpoint completes it.
        """
        given_up = await run_in_thread(lambda: self.checkpoint_manager.cut_off(self._place))
        return None if given_up is None else given_up.label.removeprefix(REWINDING)

    async def abort_fork(self, options: MergeOptions | None = None) -> list[str]:
        """Drops all branches; the parent keeps what it did itself. Returns the branches' ids.

        ForkStateError without an open fork. ConflictError where others changed files that the
        parent changed too, unless `options.own` decides: then the branches are stopped, and the
        fork is open.
        """
        async with self._lock:
            session = self._open()
            await session.quiet()
            await session.land_parent(options or MergeOptions())
            await session.finish()
        await self.land()
        return list(session.fork.branches)

    def nested(self, branch_id: str, *, runner: RunnerFactory, **options: Any) -> ForkCoordinator:
        """Returns the coordinator for forks that this branch's run makes itself; they are merged
        into the branch, and paid by it. `options` are those of the class."""
        branch = self._known(branch_id)
        branch.inner = inner = ForkCoordinator(
            self.agent,
            branch.deps,
            runner=runner,
            codec=self.codec,
            place=branch.branch,
            depth=self.depth + 1,
            outer=branch,
            **{"max_branches": self.max_branches, "max_depth": self.max_depth, **options},
        )
        return inner

    @classmethod
    async def resume(
        cls,
        fork_id: str,
        *,
        store: ForkStateStore,
        runner: RunnerFactory,
        place: Workspace | Branch | None = None,
        aggregate_budget: Budget | None = None,
        **options: Any,
    ) -> ForkCoordinator:
        """Resumes a fork of a process that has died or called `detach`.

        Runs that were running are `terminated`, with the conversation of their last request. A
        decided merge is completed (`last_merge`), and a fork that was not complete is aborted
        (`is_resolved`). A fork that a judge has merged can still be overridden. Budgets are
        restored, except for `aggregate_budget`.

        `place` is the forked workspace or branch, if the workspace is mounted elsewhere now;
        `options` are those of the class.

        Raises:
            ValueError: The fork is unknown.
            BranchingError: The workspace could not be opened.
        """
        state = await run_in_thread(lambda: store.get(fork_id))
        if state is None:
            raise ValueError(f"there is no fork {fork_id!r} to resume")
        if place is None and state.workspace is not None:
            place = await run_in_thread(lambda: place_of(state))
        made = cls(runner=runner, place=place, store=store, depth=state.depth, **options)
        if made._place is not None and state.parent is not None:
            await run_in_thread(partial(made._place.return_to, state.parent))
        ledger = Ledger(aggregate_budget or state.budget, unknown_price=made._unknown_price)
        fork = await run_in_thread(
            lambda: take_up(state, ledger, made.codec, made._place, made.parent_deps)
        )
        session = made._new_session(fork)
        made._begin(session)
        if state.phase == "resolved":
            session.close()
            session.override = Override.find(fork_id, made._place, store.home)
            if session.override is None:
                raise ForkStateError(f"fork {fork_id} is over, and cannot be overridden")
            made._overridable = session
            return made
        for branch in fork.branches.values():
            branch.runner = make_runner(runner, branch)
        if fork.phase == "open":
            await run_in_thread(session.save)
            return made
        if fork.winner is not None:
            winner = fork.branches[fork.winner]
            await made._merged(winner, winner.current_history(), FlushReport())
        await session.finish()
        return made

    async def detach(self) -> None:
        """Stops all runs and leaves the fork to be resumed: branches and state are kept."""
        async with self._lock:
            if self._session is not None and not self.is_resolved:
                await self._session.quiet()
                await run_in_thread(self._session.save)

    async def interrupt(self, error: BaseException) -> None:
        """Ends an open fork whose parent was cancelled or has failed, which `error` says.

        A fork in a durable store is left to be resumed, as by `detach`. Any other fork is aborted,
        because nothing could find it again; the parent's own changes land. What its branches
        changed is kept as patches in the run log. A note of `error` names them, or says what
        prevented the end.

        A further cancellation does not cut this short, because branches would be left and their
        work would be lost. It is raised afterwards, unless `error` is a cancellation itself.
        """
        cancelled: asyncio.CancelledError | None = None
        for _ in range(CANCELLATIONS_MAX):
            ending = asyncio.ensure_future(self._interrupt(error))
            while not ending.done():
                try:
                    await asyncio.wait([ending])
                except asyncio.CancelledError as again:
                    cancelled = again
            # At the end of an event loop all of its tasks are cancelled: the rest is done again.
            if not ending.cancelled():
                ending.result()
                break
        else:
            add_note(error, f"and fork {self.fork_id} was not ended: it was cancelled too often")
        if cancelled is not None and not isinstance(error, asyncio.CancelledError):
            raise cancelled

    async def _interrupt(self, error: BaseException) -> None:
        try:
            if self.store.home is not None:
                await self.detach()
            elif not self.is_resolved:
                await self._keep_patches(error)
                await self.abort_fork()
        except (BranchingError, OSError) as failure:
            add_note(error, f"and fork {self.fork_id} was not ended: {failure}")

    async def _keep_patches(self, error: BaseException) -> None:
        async with self._lock:
            session, place = self._open(), self._place
            await session.quiet()
            if place is None:
                return
            branches = list(session.fork.branches.values())
            kept = await run_in_thread(lambda: keep_patches(place.workspace, branches))
        for name in kept:
            add_note(error, f"the changes of branch {name} are saved: branching log --patch {name}")

    async def __aenter__(self) -> ForkCoordinator:
        """Returns the coordinator. The end of the block ends an open fork: by `aclose`, or by
        `interrupt` if the block is left by an exception or a cancellation."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            await self.aclose()
            return
        try:
            await self.interrupt(error)
        finally:
            self._release()

    async def aclose(self) -> None:
        """Ends it all: an open fork is aborted. May be called again."""
        if not self.is_resolved:
            await self.abort_fork()
        await self.land()
        if self.store.home is None:
            self._forget_override()
        self._release()

    def writable_path(self) -> Path | None:
        """Returns `parent_path` for a use of the files, and makes it writable. Blocks briefly.

        The place is read-only while others have open branches of it. The parent then works in a
        branch of its own, `agent-run-...`, which `land` commits. A conflict with changes of others
        is a warning that names paths and branch.

        Raises:
            BranchingError: The branches cannot be listed, or the branch cannot be created.
        """
        # While a fork is made or merged, the open branches are its own.
        if self._place is not None and self.is_resolved and not self._lock.locked():
            _warn(self._place.make_writable())
        return self.parent_path

    async def land(self) -> None:
        """Commits what the parent did in a branch of its own; see `writable_path`.

        Called at the end of a parent's run, when nothing of it runs any more. Does nothing while a
        fork is open. If the commit is refused, a warning says so, and the branch is kept.
        """
        async with self._lock:
            place = self._place
            if place is None or not place.is_beside or not self.is_resolved:
                return
            if self.store.home is None:
                self._forget_override()
            try:
                _warn(await run_in_thread(place.land))
            except BranchingError as error:
                warnings.warn(
                    f"the agent's changes are not committed: {error.message}; they are in branch "
                    f"{place.name}",
                    stacklevel=2,
                )

    # Helpers.

    def _release(self) -> None:
        if self._place is not None:
            self._place.close()

    def _new_session(self, fork: Fork) -> ForkSession:
        return ForkSession(
            fork, self.store, mirror_root=self._mirror_place(), keeps_mirror=self.keep_artifacts
        )

    def _mirror_place(self) -> Path | None:
        """Returns the mirror's directory. Default for kept artifacts: in the base directory."""
        if self._mirror_root is None and self.keep_artifacts and self._place is not None:
            return self._place.workspace.base
        return self._mirror_root

    def _begin(self, session: ForkSession) -> ForkHandle:
        self._forget_override()
        self._session = session
        self.judged.clear()
        self._handle = session.begin()
        return self._handle

    def _forget_override(self) -> None:
        session, self._overridable = self._overridable, None
        if session is not None:
            session.forget_override()

    async def _merged(
        self, winner: BranchRuntime, history: History, report: FlushReport
    ) -> MergeResult:
        label = f"post-fork:{winner.fork_id}"
        try:
            await run_in_thread(lambda: self.checkpoint_manager.keep(label, history, self._place))
        except BranchingError as error:
            # The files have landed: what cannot be promised any more is said.
            assert self._session is not None, "something was forked"
            self._session.warn(f"there is no checkpoint {label}: {error.message}")
        self.last_merge = MergeResult(
            fork_id=winner.fork_id,
            winner_branch_id=winner.id,
            winner_label=winner.spec.label,
            discarded_branches=tuple(name for name in self.branches if name != winner.id),
            history_after_merge=self.codec.copy(history),
            blocked_commands=winner.blocked_commands,
            **vars(report),
        )
        return self.last_merge

    def _check_limits(self, specs: Sequence[BranchSpec]) -> None:
        if not self.is_resolved:
            raise ForkStateError("a fork is open: merge or abort it first")
        if len(specs) > self.max_branches:
            raise ForkBranchLimitError(f"{len(specs)} branches; the maximum is {self.max_branches}")
        if self.depth >= self.max_depth:
            raise ForkDepthLimitError(
                f"the parent is {self.depth} forks deep, which is the maximum"
            )

    async def _check_files(self) -> None:
        if (target := await self.cut_off_rewind()) is not None:
            raise ForkStateError(
                (
                    f"a process died during a rewind to checkpoint {target}: the files may be in "
                    "a mixed state"
                ),
                hint="rewind to that checkpoint, or to another one, first",
            )

    def _lineage(self) -> str:
        return os.environ.get(FORK_VARIABLE, "") if self._outer is None else self._outer.lineage


def _warn(conflicts: Sequence[ConflictError]) -> None:
    for conflict in conflicts:
        warnings.warn(f"{conflict.message}; {conflict.hint}", stacklevel=3)


def _winning_history(winner: BranchRuntime) -> History:
    """Returns the conversation that a branch brings. ForkStateError if it cannot win."""
    if winner.status.state == "failed":
        raise ForkStateError(
            f"branch {winner.id} failed: {winner.status.error}"
        ) from winner.failure
    history = winner.current_history()
    if not history:
        raise ForkStateError(f"branch {winner.id} was stopped before it produced a message")
    return history
