"""A fork at work: its runs attended, its state kept, its mirror brought up to date.

One for each fork, from making it to its end. The coordinator calls it under its lock; only
`changed` may be called from anywhere.
"""

from __future__ import annotations

import asyncio
import threading
import warnings
from contextlib import suppress
from pathlib import Path

from branching._threads import call_soon, run_in_thread
from branching.agent.branch_runtime import BranchRuntime, RunnerFactory, make_runner
from branching.agent.checkpoint_manager import CheckpointManager
from branching.agent.errors import ForkStateError
from branching.agent.fork import Fork
from branching.agent.materializer import Mirror
from branching.agent.merge_override import Override, kept
from branching.agent.protocols import ForkStateStore
from branching.agent.run_supervisor import RunSupervisor
from branching.agent.types import FlushReport, ForkHandle, MergeOptions
from branching.errors import BranchingError

SAVE_RETRY_SECONDS = 1.0
"""After a failed save: the disk may have room again, or another process released the database."""


class ForkSession:
    """One fork, its branches and their runs."""

    def __init__(
        self, fork: Fork, store: ForkStateStore, *, mirror_root: Path | None, keeps_mirror: bool
    ) -> None:
        self.fork = fork
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._is_noticing = False
        self._is_behind = False
        self._catching_up: asyncio.Task[None] | None = None
        self._writing = threading.Lock()  # guards the next one, and the order of what is written
        self._is_removed = False
        self._mirror = Mirror(mirror_root, fork.fork_id) if mirror_root else None
        self._keeps_mirror = keeps_mirror
        self.supervisor: RunSupervisor | None = None
        self.override: Override | None = None
        """Of the merge, if it was automatic and brought files."""

    async def make(self, checkpoints: CheckpointManager, runner: RunnerFactory) -> None:
        """Creates the branches and their runs. If that fails, none is left."""
        fork = self.fork
        try:
            if fork.place is not None:
                # so that after a process that dies now can be cleaned up
                await run_in_thread(self.save)
            await run_in_thread(fork.make_files)
            for branch in fork.branches.values():
                branch.runner = make_runner(runner, branch)
            label, history = f"fork:{fork.fork_id}", fork.parent_history
            fork.checkpoint_id = await run_in_thread(
                lambda: checkpoints.keep(label, history, fork.place)
            )
            fork.phase = "open"
            await run_in_thread(self.save)
        except BaseException:
            fork.phase = "resolved"
            await run_in_thread(fork.drop_files)
            self._remove()
            raise

    def begin(self) -> ForkHandle:
        """Starts the runs of all branches that are to run."""
        self.supervisor = RunSupervisor(self.fork, self.changed)
        for branch in self.fork.branches.values():
            if branch.is_running:
                self.supervisor.start(branch, branch.spec.steer)
        self.changed()
        return self.fork.handle()

    async def quiet(self) -> None:
        """Stops all runs with all that they started, and ends forks within."""
        assert self.supervisor is not None, "an open fork is attended"
        await self.supervisor.stop_all(self.fork.branches.values())
        for branch in self.fork.branches.values():
            await self._stop_rest(branch)
            if branch.inner is not None:
                await branch.inner.aclose()
        await self.supervisor.kill_all()

    async def _stop_rest(self, branch: BranchRuntime) -> None:
        """Stops what a run has left running, which outlives the run."""
        try:
            if branch.runner is not None:
                await branch.runner.stop()
        except Exception as error:
            raise ForkStateError(
                f"the run of branch {branch.id} cannot be stopped: {error}",
                hint="its files are neither merged nor dropped, and the fork is open: try again",
            ) from error

    async def check_conflicts(self, winner: BranchRuntime, options: MergeOptions) -> None:
        """Refuses before any run is stopped. The merge looks again."""
        files, branch = self.fork.files, winner.branch
        if files is not None and branch is not None and options.on_conflict == "fail":
            await run_in_thread(lambda: files.refuse_conflicts(branch, options))

    async def merge(
        self, winner: BranchRuntime, options: MergeOptions, *, is_automatic: bool
    ) -> FlushReport:
        """Lands the parent's files and the winner's. The runs are quiet."""
        fork = self.fork
        files, branch = fork.files, winner.branch
        fork.winner = winner.id
        if files is None:
            return FlushReport()
        if branch is None:
            await self.land_parent(options)
            return FlushReport()

        def merge() -> FlushReport:
            fork.keep_patches()
            if not is_automatic:
                return files.merge(branch, options, self._decide)
            override = Override.prepare(fork, winner, self._store.home)
            try:
                report = files.merge(branch, options, self._decide)
            except BaseException:
                override.forget()
                raise
            self.override = override if override.settle() else None
            return report

        return await run_in_thread(merge)

    async def land_parent(self, options: MergeOptions) -> None:
        """Commits the parent's changes since the fork if there is no winner with files."""
        files = self.fork.files
        if files is not None:
            await run_in_thread(self.fork.keep_patches)
            await run_in_thread(lambda: files.land_parent(options, self._decide))

    def _decide(self, carrier: str | None) -> None:
        """Keeps which branch's commit decides how the fork ends; None if it came to nothing."""
        self.fork.carrier, self.fork.phase = carrier, "open" if carrier is None else "merging"
        self.save()

    def close(self) -> None:
        """Nothing runs any more, nor will."""
        if self.supervisor is not None:
            self.supervisor.close()

    async def finish(self) -> None:
        """Aborts the remaining branches. Afterwards another fork can be made."""
        self.fork.phase = "resolved"
        self.close()
        if self._catching_up is not None:
            await asyncio.wait([self._catching_up])
        if self._keeps_mirror:
            await run_in_thread(self._refresh)
        left = await run_in_thread(self.fork.drop_files)
        if self._mirror is not None and not self._keeps_mirror:
            await run_in_thread(self._mirror.remove)
        if self.override is not None:
            await run_in_thread(self._forget_earlier)
            await run_in_thread(self.save)
        elif not left:
            self._remove()
        for reason in left:
            self.warn(f"a branch of fork {self.fork.fork_id} is left: {reason}")

    def forget_override(self) -> None:
        """Removes the archives for an override. Raises ForkStoreError if that fails."""
        if self.override is not None:
            self.override.forget()
            self.override = None
            self._remove()

    def _forget_earlier(self) -> None:
        """One override is kept for each place: the last."""
        place, home = self.fork.place, self._store.home
        if place is None or home is None:
            return
        for fork_id, branch in list(kept(home)):
            if branch == place.name and fork_id != self.fork.fork_id:
                earlier = Override.find(fork_id, place, home)
                if earlier is not None:
                    earlier.forget()
                self._store.remove(fork_id)

    def save(self) -> None:
        """Keeps the present state. Dumps the conversations, so an event loop calls it in a thread.
        ForkStoreError if that fails."""
        with self._writing:
            if not self._is_removed:
                self._store.save(self.fork.state())

    def _remove(self) -> None:
        with self._writing:
            self._store.remove(self.fork.fork_id)
            self._is_removed = True  # later events are not written

    def changed(self) -> None:
        """Something happened to a branch, in whatever thread: it is kept, once for many."""
        if self._is_noticing:
            return
        self._is_noticing = True
        call_soon(self._loop, self._noticed)

    def _noticed(self) -> None:
        self._is_noticing = False
        if self.fork.phase != "open" or self.supervisor is None:
            return
        self.supervisor.notice_spending()
        self._is_behind = True
        if self._catching_up is None or self._catching_up.done():
            self._catching_up = self._loop.create_task(self._catch_up())

    async def caught_up(self) -> None:
        """Waits until all that has happened so far is recorded, as far as it can be."""
        await asyncio.sleep(0)  # `_noticed` is called in the next round of the loop
        if self._catching_up is not None:
            await asyncio.wait([self._catching_up])

    async def _catch_up(self) -> None:
        """Brings store and mirror up to date in a thread: a screen here waits for no disk."""
        while self._is_behind:
            self._is_behind = False
            try:
                await run_in_thread(self.save)
            except BranchingError as error:
                # The runs continue, with a warning that the fork cannot be resumed.
                said = f"the fork would not survive a restart: {error.message}"
                self.warn(said)
                self._loop.call_later(SAVE_RETRY_SECONDS, self.changed)
            await run_in_thread(self._record_originals)
            await run_in_thread(self._refresh)

    def _record_originals(self) -> None:
        files = self.fork.files
        if files is None:
            return
        branches = [each.branch for each in self.fork.branches.values() if each.branch is not None]
        # What is not recorded is a conflict once others have touched it.
        with suppress(OSError, BranchingError):
            files.record_originals(branch for branch in branches if branch.is_open)

    def _refresh(self) -> None:
        if self._mirror is None:
            return
        try:
            self._mirror.refresh(self.fork.branches.values())
        except (OSError, BranchingError) as error:
            self.warn(f"the mirror of the fork is not up to date: {error}")

    def warn(self, text: str) -> None:
        """Warns of something that ends neither the runs nor a merge. May be called in any thread.

        If warnings are errors, the event loop's exception handler gets it, because an exception
        here would stop the work.
        """
        try:
            warnings.warn(text, stacklevel=3)
        except Warning as error:
            context = {"message": f"fork {self.fork.fork_id}: {text}", "exception": error}
            call_soon(self._loop, self._loop.call_exception_handler, context)
