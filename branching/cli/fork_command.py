"""One fork from the command line, from its branches to the merge: what `branching fork` does.

Ends in one of three ways. It is merged; it is dropped with all its branches, because no branch
succeeded or a signal came; or it is left open, to be taken up again: because the merge was refused,
or it was taken up itself and came to nothing.
"""

from __future__ import annotations

import asyncio
import shlex
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from branching._caller import for_caller
from branching._cancellation import CancelScope
from branching._threads import call_soon, run_in_thread
from branching.agent.branch_runtime import BranchRuntime
from branching.agent.checkpoint import InMemoryCheckpointStore
from branching.agent.command import CommandJudge, CommandRunner, best_tested
from branching.agent.coordinator import ForkCoordinator
from branching.agent.errors import ForkStateError
from branching.agent.fork_log import ForkLog
from branching.agent.judge import Panel
from branching.agent.project_tests import BranchTester, TestRun
from branching.agent.types import BranchSpec, Budget, MergeOptions, MergeResult, MergeStrategy
from branching.cli.hints import patch_hint
from branching.cli.output import warning_facts
from branching.cli.progress import show_progress
from branching.cli.signals import run_interruptible
from branching.errors import BranchingError
from branching.patterns.command_candidate import BlockSplitter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from branching.agent.types import OnConflict
    from branching.cli.fork_registry import ForkRegistry
    from branching.fs import Workspace

T = TypeVar("T")
_RESULT_STATES = {"done": "succeeded", "terminated": "cancelled"}
"""A fork's words for the states that other commands have, too."""
NOTICE_SECONDS = 0.1
"""How often the log is brought up to date."""
CHUNKS_WAITING_MAX = 16
"""A program that prints faster than we write down waits."""
Program = str | list[str]
"""A text for the shell, or a program's words."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How the winner is chosen, and what of it is merged."""

    pick: str | None = None
    judge: str | None = None
    tests: str | None = None
    conflict: OnConflict = "keep"
    only: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The fork to make."""

    commands: dict[str, Program]
    """By label."""
    choice: Choice
    each: Budget = field(default_factory=Budget)
    group: Budget = field(default_factory=Budget)

    def saved_options(self) -> dict[str, Any]:
        """Returns the options to save with the fork; budgets are saved separately."""
        return {"commands": self.commands, "choice": asdict(self.choice)}

    @staticmethod
    def of(told: dict[str, Any], changed: dict[str, Any]) -> Plan:
        """Returns the plan of a fork that was left, with another choice as far as one is given."""
        choice = told["choice"]
        if {"pick", "judge", "tests"} & changed.keys():
            choice |= {"pick": None, "judge": None, "tests": None}
        return Plan(commands=told["commands"], choice=Choice(**{**choice, **changed}))


class ForkCommand:
    """One call of the command. `run` it once."""

    def __init__(self, space: Workspace, kept: ForkRegistry, *, quiet: bool = False) -> None:
        self._space = space
        self._kept = kept
        self._quiet = quiet
        self._plan = Plan(commands={}, choice=Choice())
        self._tester: BranchTester | None = None
        self._coordinator: ForkCoordinator | None = None
        self._log: ForkLog | None = None
        self._room = threading.Semaphore(CHUNKS_WAITING_MAX)
        self._branches: list[dict[str, Any]] = []
        self._kept_names: list[str] = []
        self._branch_names: list[str] = []
        self.timed_out = False
        self.is_left = False
        """The fork is open still, for the next command."""
        self.has_failed_tests = False
        """The chosen branch does not pass the tests, so nothing was merged."""

    def fork(self, plan: Plan) -> MergeResult | None:
        """Forks, waits, chooses, merges. A signal ends it in order; nothing is merged then."""
        self._plan = plan
        return self._interruptible(self._forked)

    def resume(
        self, fork_id: str, *, changed: dict[str, Any], is_rerun: bool
    ) -> MergeResult | None:
        """Goes on with a fork that was left: its cut-off runs may be run again, then it chooses."""
        return self._interruptible(lambda: self._resumed(fork_id, changed, is_rerun))

    def drop(self, fork_id: str) -> None:
        """Drops a fork that was left, with its branches."""

        async def dropped() -> None:
            coordinator = await self._taken_up(fork_id, {})
            try:
                if not coordinator.is_resolved:
                    await coordinator.abort_fork()
            finally:
                self._note(coordinator)

        self._interruptible(dropped)

    @property
    def logged_branches(self) -> list[str]:
        """The branches that the run log has of this call."""
        return [] if self._log is None else self._log.branches

    # How it goes.

    async def _forked(self) -> MergeResult | None:
        plan = self._plan
        about = {**self._kept.new(), **plan.saved_options()}
        coordinator = ForkCoordinator(**self._options())
        specs = [
            BranchSpec(label, _text(command), budget=plan.each)
            for label, command in plan.commands.items()
        ]
        with self._logged(coordinator):
            try:
                await coordinator.fork(specs, aggregate_budget=plan.group, about=about)
                return await self._end(coordinator)
            finally:
                if not self.is_left:
                    if self._log is not None:
                        self._log.notice()  # also branches that began just now have a patch
                    await coordinator.aclose()
                self._note(coordinator)

    async def _resumed(
        self, fork_id: str, changed: dict[str, Any], is_rerun: bool
    ) -> MergeResult | None:
        coordinator = await self._taken_up(fork_id, changed)
        if coordinator.is_resolved:
            self._note(coordinator)
            if coordinator.last_merge is None:
                raise ForkStateError(
                    f"fork {fork_id} was interrupted while it was created; no agent had run, and "
                    "it was dropped"
                )
            return coordinator.last_merge
        self.is_left = True
        with self._logged(coordinator):
            try:
                for branch in coordinator.branches.values():
                    branch.runner = self._runner(branch)  # the one it has knows no log
                    if is_rerun and branch.status.state == "terminated":
                        await coordinator.run_again(branch.id)
                merged = await self._end(coordinator)
                self.is_left = merged is None
                return merged
            finally:
                if self.is_left:
                    await coordinator.detach()
                self._note(coordinator)

    async def _taken_up(self, fork_id: str, changed: dict[str, Any]) -> ForkCoordinator:
        state = self._kept.take(fork_id)
        self._plan = Plan.of(state.about, changed)
        labels = [branch.spec.label for branch in state.branches]
        if (pick := self._plan.choice.pick) is not None and pick not in labels:
            raise ForkStateError(f"--pick names no branch; the branches are {', '.join(labels)}")
        options = self._options()
        try:
            return await ForkCoordinator.resume(fork_id, store=options.pop("store"), **options)
        except ForkStateError:
            self._kept.store.remove(fork_id)  # nothing is left to resume
            raise

    def _options(self) -> dict[str, Any]:
        """Returns what the coordinator is made of."""
        plan = self._plan
        if plan.choice.tests is not None:
            self._tester = BranchTester(plan.choice.tests, seen_at=self._space.seen_at)
        judge: Any = best_tested
        if plan.choice.judge is not None:
            judge = CommandJudge(plan.choice.judge, lambda: list(self._runtimes()))
        return {
            "runner": self._runner,
            "place": self._space,
            "goal": "\n".join(f"{name}: {_text(each)}" for name, each in plan.commands.items()),
            "max_branches": len(plan.commands),
            "store": self._kept.store,
            "checkpoint_store": InMemoryCheckpointStore(),
            "tester": self._tester,
            "judge": Panel(judge),
        }

    def _runtimes(self) -> Sequence[BranchRuntime]:
        assert self._coordinator is not None, "it was forked"
        return list(self._coordinator.branches.values())

    def _runner(self, branch: BranchRuntime) -> CommandRunner:
        name = branch.spec.label
        return CommandRunner(
            branch,
            self._plan.commands[name],
            index=list(self._plan.commands).index(name),
            seen_at=self._space.seen_at,
            on_output=self._hearer(branch),
            controller=None if self._log is None else self._log.controller,
        )

    async def _end(self, coordinator: ForkCoordinator) -> MergeResult | None:
        """Waits for what runs, and merges the winner."""
        running = {each.task for each in coordinator.branches.values() if each.task is not None}
        if running:
            await asyncio.wait(running)
        try:
            return await self._merge(coordinator)
        except BranchingError as error:
            if self._kept.outlives_us and not coordinator.is_resolved:
                # What was tried may have cost much: it is not dropped for a judge that fails.
                self.is_left = True
                await coordinator.detach()
                before = f"{error.hint}; " if error.hint else ""
                error.hint = (
                    f"{before}the fork is open: branching fork --resume {coordinator.fork_id} "
                    f"chooses again, branching fork --drop {coordinator.fork_id} drops it"
                )
            raise

    async def _merge(self, coordinator: ForkCoordinator) -> MergeResult | None:
        choice = self._plan.choice
        branches = {each.spec.label: each for each in coordinator.branches.values()}
        done = [each for each in branches.values() if each.status.state == "done"]
        self.timed_out = any(map(_is_out_of_time, branches.values()))
        options = MergeOptions(on_conflict=choice.conflict, only=tuple(choice.only))
        if choice.pick is not None:
            winner = branches[choice.pick]
            if winner not in done:
                return None
            if self._tester is not None:
                await self._tester(winner)
        elif not done:
            return None
        else:
            # Not `auto`: for that the files of all branches are kept, to be able to change one's
            # mind.
            outcome = await coordinator.resolve(MergeStrategy(kind="auto_with_fallback"))
            assert outcome.verdict is not None, "somebody was asked"
            winner = coordinator.branches[outcome.verdict.winner_branch_id]
        if self._tester is not None and not _passed(self._tester.runs.get(winner.id)):
            self.has_failed_tests = True
            if self._kept.outlives_us:
                self.is_left = True
                await coordinator.detach()
            return None
        return await self._merge_one(coordinator, winner, options)

    async def _merge_one(
        self, coordinator: ForkCoordinator, winner: BranchRuntime, options: MergeOptions
    ) -> MergeResult:
        """Merges a branch. What it changed is kept as a patch: not all of it may be merged."""
        if self._log is not None and winner.branch is not None:
            self._log.notice()
            await run_in_thread(partial(self._log.keep_patch, winner.branch))
        return await _whole(coordinator.merge_or_select(f"pick:{winner.id}", options))

    # What is seen of it.

    @contextmanager
    def _logged(self, coordinator: ForkCoordinator) -> Iterator[None]:
        """Displays and logs the events for the length of the `with`."""
        self._coordinator = coordinator
        names = list(self._plan.commands)
        with ExitStack() as stack:
            labels = [_text(command) for command in self._plan.commands.values()]
            show = stack.enter_context(show_progress(labels, quiet=self._quiet, names=names))
            self._log = log = stack.enter_context(ForkLog(coordinator, self._space, "fork", show))

            async def notice() -> None:
                while True:
                    log.notice()
                    await asyncio.sleep(NOTICE_SECONDS)

            stack.callback(log.notice)
            stack.callback(asyncio.ensure_future(notice()).cancel)
            yield

    def _hearer(self, branch: BranchRuntime) -> Callable[[str, bytes], None]:
        """Returns what hands a branch's output to the log, in whole lines."""
        loop, ours = asyncio.get_running_loop(), threading.get_ident()
        found: list[str] = []
        lines = BlockSplitter(found.append)

        def heard(text: str, is_room_taken: bool) -> None:
            if is_room_taken:
                self._room.release()
            if self._log is not None:
                self._log.heard(branch.id, text)

        def hear(_: str, arrived: bytes) -> None:
            (lines.feed(arrived) if arrived else lines.finish())
            text = "".join(f"{block}\n" for block in found)
            found.clear()
            is_program = threading.get_ident() != ours  # only that may wait
            if text and is_program:
                self._room.acquire()
            if text:
                call_soon(loop, heard, text, is_program)

        return hear

    def _note(self, coordinator: ForkCoordinator) -> None:
        self._coordinator = coordinator
        runs = {} if self._tester is None else self._tester.runs
        for branch in coordinator.branches.values():
            run, spent = runs.get(branch.id), branch.cost_tracker
            self._branch_names.append("" if branch.branch is None else branch.branch.name)
            if branch.keeps() and branch.branch is not None and branch.branch.is_open:
                self._kept_names.append(branch.branch.name)
            self._branches.append(
                {
                    "id": branch.id,
                    "label": branch.spec.label,
                    "state": branch.status.state,
                    **({"error": branch.status.error} if branch.status.error else {}),
                    "spent": asdict(spent) if spent.requests else None,
                    "tests": None
                    if run is None
                    else {
                        "ratio": run.ratio,
                        "reason": run.reason,
                        "counts": None if run.counts is None else vars(run.counts),
                    },
                }
            )

    def facts(self, merged: MergeResult | None) -> dict[str, Any]:
        """Returns the command's document."""
        coordinator = self._coordinator
        return {
            "fork": None if coordinator is None else coordinator.fork_id,
            "committed": merged is not None,
            "winner": None if merged is None else merged.winner_label,
            "winner_index": self._winner_index(merged),
            "candidate_count": len(self._branches),
            "results": [self._result_facts(index, merged) for index in range(len(self._branches))],
            "branches": self._branches,
            "applied": [] if merged is None else list(merged.applied_paths),
            "deleted": [] if merged is None else list(merged.deleted_paths),
            "conflicts": [] if merged is None else list(merged.conflicts),
            "unselected": [] if merged is None else list(merged.unselected),
            "errors": [] if merged is None else [vars(error) for error in merged.errors],
            "kept": self._kept_names,
            **({} if merged is None else warning_facts(merged.privileged)),
        }

    def _winner_index(self, merged: MergeResult | None) -> int | None:
        if merged is None:
            return None
        return [branch["id"] for branch in self._branches].index(merged.winner_branch_id)

    def _result_facts(self, index: int, merged: MergeResult | None) -> dict[str, Any]:
        """Returns one entry of `results`, in the words of the commands that try candidates."""
        branch = self._branches[index]
        is_winner = index == self._winner_index(merged)
        state = "won" if is_winner else _RESULT_STATES.get(branch["state"], branch["state"])
        return {
            "index": index,
            "success": state in ("won", "succeeded"),
            **({"error": branch["error"]} if "error" in branch else {}),
            "state": state,
            "label": branch["label"],
            "branch": self._branch_names[index],
        }

    def lines(self, merged: MergeResult | None) -> list[str]:
        """Returns the same for people."""
        lines = []
        for branch in self._branches:
            tests, spent = branch["tests"], branch["spent"]
            told = f" ({branch['error']})" if "error" in branch else ""
            told += f", spent {_spent(spent)}" if spent else ""
            told += f", tests: {tests['reason']}" if tests else ""
            lines.append(f"  [{branch['label']}] {branch['state']}{told}")
        if self._kept_names:
            names = " ".join(self._kept_names)
            how = for_caller("branching commit --policy snapshot NAME")
            lines.append(f"kept: {names} (commit one: {how})")
        if merged is not None:
            lines += merged.notice_lines()[1:]
            name = self._branch_names[self._winner_index(merged) or 0]
            if merged.conflicts:
                how = f"the winner's version of these paths: branching log --patch {name}"
                lines.append(for_caller(how))
            if merged.unselected:
                how = f"all changes of the winner: branching log --patch {name}"
                lines += [f"not selected: {' '.join(merged.unselected)}", for_caller(how)]
        elif self.is_left and self.has_failed_tests and self._coordinator is not None:
            fork_id = self._coordinator.fork_id
            lines.append(
                for_caller(
                    f"the tests failed; the fork is open: branching fork --resume {fork_id} "
                    f"--pick NAME merges a branch anyway, branching fork --drop {fork_id} drops it"
                )
            )
        elif self.is_left and self._coordinator is not None:
            fork_id = self._coordinator.fork_id
            lines.append(
                for_caller(
                    f"the fork is open: branching fork --resume {fork_id} --rerun runs the "
                    f"interrupted branches again, branching fork --drop {fork_id} drops it"
                )
            )
        return lines

    def _interruptible(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """Runs it to its end, or to that of a signal: None."""

        async def main() -> T:
            task = asyncio.current_task()
            loop = asyncio.get_running_loop()
            scope = CancelScope.current()
            assert task is not None
            assert scope is not None, "interruptible makes one"

            def stop(_: float) -> None:
                call_soon(loop, task.cancel)

            scope.on_cancel(stop)
            return await work()

        def call() -> T | None:
            try:
                return asyncio.run(main())
            except asyncio.CancelledError:
                return None  # by a signal, which is reported

        return run_interruptible(
            call,
            is_done=lambda done: done is not None,
            hint=lambda: None if self._log is None else patch_hint(self._log.patched),
        )


async def _whole(merge: Coroutine[Any, Any, MergeResult]) -> MergeResult:
    """Waits for a merge despite signals, so that the commit is reported."""
    task = asyncio.ensure_future(merge)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise
    return task.result()


def _passed(run: TestRun | None) -> bool:
    return run is not None and run.ratio == 1.0


def _is_out_of_time(branch: BranchRuntime) -> bool:
    runner = branch.runner
    is_told = isinstance(runner, CommandRunner) and runner.refusal is not None
    return branch.status.state == "budget_exhausted" and not is_told


def _spent(spent: dict[str, Any]) -> str:
    usd = "" if spent["usd"] is None else f"${spent['usd']:.4f}, "
    return f"{usd}{spent['tokens']} tokens, {spent['requests']} requests"


def _text(command: Program) -> str:
    return command if isinstance(command, str) else shlex.join(command)
