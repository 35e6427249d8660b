"""`branching fork`: any programs in branches of one fork, one is merged."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from branching.cli.failure import EXIT_NOTHING_SUCCEEDED, EXIT_TIMEOUT, UsageFault, reported
from branching.cli.options import (
    CandidatesOption,
    CommandArgument,
    JsonOption,
    QuietOption,
    SelectOption,
    TimeoutOption,
    WorkspaceOption,
)
from branching.cli.report import print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from branching.agent.coordinator import ForkCoordinator
    from branching.agent.testing import BranchTester
    from branching.agent.types import BranchSpec, MergeResult
    from branching.fs import Workspace

N_DEFAULT = 3


class Conflict(str, Enum):
    """What becomes of a path that somebody else changed since the fork."""

    keep = "keep"
    theirs = "theirs"
    fail = "fail"
    merge3 = "merge3"


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """How the winner is chosen, and what of it is merged."""

    pick: str | None
    judge: str | None
    tests: str | None
    conflict: Conflict
    only: Sequence[str]


def fork(
    command: CommandArgument = None,
    candidates: CandidatesOption = None,
    n: Annotated[
        int | None,
        typer.Option(
            "-n",
            min=1,
            help=f"How many branches run CMD. [default: {N_DEFAULT}]",
            show_default=False,
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Name of a branch, in the order of the branches; repeat for more. [default: 0, 1, "
            "...]",
            show_default=False,
        ),
    ] = None,
    test_command: Annotated[
        str | None,
        typer.Option(
            metavar="CMD",
            help="Run by sh in each branch that succeeded; `auto` finds the project's own. Without "
            "a judge the branch wins whose tests pass the most.",
            show_default=False,
        ),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(
            metavar="CMD",
            help="Run by sh to choose: BRANCHING_CASE tells what the branches did, "
            "BRANCHING_LABELS and BRANCHING_BRANCHES list names and directories, a line each; its "
            "last line is the winner's name.",
            show_default=False,
        ),
    ] = None,
    pick: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Merge this branch, whoever else succeeds.", show_default=False
        ),
    ] = None,
    on_conflict: Annotated[
        Conflict,
        typer.Option(
            help="A path that was changed in the workspace meanwhile: keep what is there, take the "
            "branch's (theirs), merge nothing (fail), or merge texts line by line, where what was "
            "there at the fork is known still (merge3). It is told in any case."
        ),
    ] = Conflict.keep,
    select: SelectOption = None,
    timeout: TimeoutOption = None,
    workspace: WorkspaceOption = None,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Run agents of any kind side by side in branches, compare them, and merge one.

    The workspace may be changed meanwhile: the merge looks at each path as it was at the fork, as
    it is now, and as the winner has it. Either one command N times (-- CMD), or several (-c CMD -c
    CMD). Without a judge and tests the first branch that succeeded wins. Exit code: 0 merged, 1 no
    branch succeeded, 124 the time was over before one did.

    Example: branching fork -n 3 --test-command auto -- claude -p "fix issue 7"
    """
    with reported(json=json):
        if bool(command) == bool(candidates):
            raise UsageFault("give either one command (-- CMD...) or candidates (-c CMD)")
        if candidates and n is not None:
            raise UsageFault("-n is for one command; candidates have their own number")
        if pick is not None and judge is not None:
            raise UsageFault("--pick and --judge both choose: give one of them")
        commands: list[Any] = [*(candidates or [])] or [command] * (n or N_DEFAULT)
        labels = [*(label or []), *map(str, range(len(label or []), len(commands)))]
        if len(labels) > len(commands) or len(set(labels)) < len(labels):
            raise UsageFault("each branch takes one label of its own")
        if pick is not None and pick not in labels:
            raise UsageFault(f"--pick names no branch: there are {', '.join(labels)}")
        choice = _Choice(
            pick=pick, judge=judge, tests=test_command, conflict=on_conflict, only=select or ()
        )

        from branching.cli.place import opened_workspace

        with opened_workspace(workspace) as space:
            forking = _Forking(
                space, dict(zip(labels, commands, strict=True)), choice, timeout, quiet
            )
            merged = forking.run()
        if json:
            print_json("fork", **forking.facts(merged))
        else:
            for line in forking.lines(merged):
                print(line)
            sys.stdout.flush()
        if merged is None:
            raise typer.Exit(EXIT_TIMEOUT if forking.timed_out else EXIT_NOTHING_SUCCEEDED)


class _Forking:
    """One fork from the command line."""

    def __init__(
        self,
        space: Workspace,
        commands: dict[str, Any],
        choice: _Choice,
        timeout: float | None,
        quiet: bool,
    ) -> None:
        self._space = space
        self._commands = commands
        self._choice = choice
        self._timeout = timeout
        self._quiet = quiet
        self._tester: BranchTester | None = None
        self._coordinator: ForkCoordinator | None = None
        self._branches: list[dict[str, Any]] = []
        self.timed_out = False

    def run(self) -> MergeResult | None:
        """Forks, waits, chooses, merges. A signal ends it in order; nothing is merged then."""
        import asyncio

        from branching.cli.interrupt import interruptible
        from branching.patterns.scope import Scope

        async def main() -> MergeResult | None:
            task = asyncio.current_task()
            loop = asyncio.get_running_loop()
            scope = Scope.current()
            assert task is not None
            assert scope is not None, "interruptible makes one"

            def stop(_: float) -> None:
                loop.call_soon_threadsafe(task.cancel)

            scope.on_cancel(stop)
            return await self._fork()

        def call() -> MergeResult | None:
            try:
                return asyncio.run(main())
            except asyncio.CancelledError:
                return None  # by a signal, which is told

        return interruptible(call, is_done=lambda merged: merged is not None)

    async def _fork(self) -> MergeResult | None:
        import asyncio

        from branching.agent.checkpoint import InMemoryCheckpointStore
        from branching.agent.command import CommandJudge, CommandRunner, best_tested
        from branching.agent.coordinator import ForkCoordinator
        from branching.agent.judge import Panel
        from branching.agent.runtime import BranchRuntime
        from branching.agent.testing import BranchTester

        labels = list(self._commands)
        seen_at = self._space.seen_at

        def runner(branch: BranchRuntime) -> CommandRunner:
            name = branch.spec.label
            return CommandRunner(
                branch,
                self._commands[name],
                index=labels.index(name),
                seen_at=seen_at,
                on_output=None if self._quiet else _Shown().feed,
            )

        if self._choice.tests is not None:
            self._tester = BranchTester(self._choice.tests, seen_at=seen_at)
        judge: Any = best_tested
        if self._choice.judge is not None:
            judge = CommandJudge(self._choice.judge, lambda: list(coordinator.branches.values()))
        self._coordinator = coordinator = ForkCoordinator(
            runner=runner,
            place=self._space,
            goal="\n".join(f"{name}: {_text(self._commands[name])}" for name in labels),
            max_branches=len(labels),
            checkpoint_store=InMemoryCheckpointStore(),
            tester=self._tester,
            judge=Panel(judge),
        )
        try:
            await coordinator.fork([self._spec(name) for name in labels])
            await asyncio.wait({each.task for each in coordinator.branches.values() if each.task})
            return await self._merge(coordinator)
        finally:
            self._note(coordinator)
            await coordinator.aclose()

    def _spec(self, name: str) -> BranchSpec:
        from branching.agent.types import BranchSpec, Budget

        return BranchSpec(name, _text(self._commands[name]), budget=Budget(seconds=self._timeout))

    async def _merge(self, coordinator: ForkCoordinator) -> MergeResult | None:
        from branching.agent.types import MergeOptions, MergeStrategy

        branches = {each.spec.label: each for each in coordinator.branches.values()}
        done = [each for each in branches.values() if each.status.state == "done"]
        self.timed_out = any(each.status.state == "budget_exhausted" for each in branches.values())
        picked = self._choice.pick
        if not done or (picked is not None and branches[picked] not in done):
            return None
        options = MergeOptions(
            on_conflict=self._choice.conflict.value, only=tuple(self._choice.only)
        )
        if picked is not None:
            return await coordinator.merge_or_select(f"pick:{branches[picked].id}", options)
        outcome = await coordinator.resolve(MergeStrategy(kind="auto"), options)
        return outcome.merge_result

    def _note(self, coordinator: ForkCoordinator) -> None:
        runs = {} if self._tester is None else self._tester.runs
        for branch in coordinator.branches.values():
            run = runs.get(branch.id)
            self._branches.append(
                {
                    "id": branch.id,
                    "label": branch.spec.label,
                    "state": branch.status.state,
                    **({"error": branch.status.error} if branch.status.error else {}),
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
            "branches": self._branches,
            "applied": [] if merged is None else list(merged.applied_paths),
            "deleted": [] if merged is None else list(merged.deleted_paths),
            "conflicts": [] if merged is None else list(merged.conflicts),
            "errors": [] if merged is None else [vars(error) for error in merged.errors],
        }

    def lines(self, merged: MergeResult | None) -> list[str]:
        """Returns the same for people."""
        lines = ["no branch was merged"] if merged is None else [f"winner: {merged.winner_label}"]
        for branch in self._branches:
            tests = branch["tests"]
            told = f" ({branch['error']})" if "error" in branch else ""
            told += f", tests: {tests['reason']}" if tests else ""
            lines.append(f"  [{branch['label']}] {branch['state']}{told}")
        if merged is not None:
            lines += merged.notice.splitlines()[1:]
        return lines


class _Shown:
    """What branches print, line by line on stderr."""

    def __init__(self) -> None:
        from branching.patterns.program import Lines

        self._label = ""
        self._lines = Lines(lambda line: print(f"[{self._label}] {line}", file=sys.stderr))

    def feed(self, label: str, arrived: bytes) -> None:
        self._label = label
        self._lines.feed(arrived)


def _text(command: Any) -> str:
    import shlex

    return command if isinstance(command, str) else shlex.join(command)
