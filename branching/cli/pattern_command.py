"""What all commands that try candidates share: their options, and one call of a pattern.

    with reported(json=options.json), Search("speculate", options) as search:
        outcome = search.run(Speculate([search.program(text) for text in candidates], **search.how))
    finish(...)

A Search opens the workspace, makes the programs that run in its branches, shows and keeps what
they print, and does with the winner what the options say.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from branching.cli.error_handling import UsageFault
from branching.cli.hints import RefusedWrites, patch_hint
from branching.cli.isolation_options import IsolationOptions
from branching.cli.limit_options import GroupLimitOptions, LimitOptions
from branching.cli.options import (
    DropRestOption,
    JsonOption,
    ParallelOption,
    QuietOption,
    SelectOption,
    SetupOption,
    TimeoutOption,
    VerboseOption,
    WorkspaceOption,
)
from branching.cli.report_file import ReportFile, ReportOption
from branching.cli.runner_options import RunnerOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from branching.fs import Branch, Workspace
    from branching.patterns import SpeculationOutcome
    from branching.patterns.command_callbacks import Expander, Judge, Scorer
    from branching.patterns.command_candidate import Program, Reader
    from branching.runlog.events import Event


_NESTED = ("beam-search", "tree-of-thoughts")
"""Commands whose branches are nested."""


class Success(str, Enum):
    """What becomes of the winner's branch."""

    commit = "commit"
    keep = "keep"
    abort = "abort"


class Failure(str, Enum):
    """What becomes of the branches when nothing succeeds. `none` is an older word for `keep`."""

    abort = "abort"
    keep = "keep"
    none = "none"


@dataclass(frozen=True, kw_only=True)
class SearchOptions(GroupLimitOptions, LimitOptions, IsolationOptions, RunnerOptions):
    """The options of every command that tries candidates."""

    workspace: WorkspaceOption = None
    timeout: TimeoutOption = None
    parallel: ParallelOption = None
    setup: SetupOption = None
    select: SelectOption = None
    drop_rest: DropRestOption = False
    on_success: Annotated[
        Success, typer.Option(help="What to do with the winner's branch.", show_choices=True)
    ] = Success.commit
    on_error: Annotated[
        Failure, typer.Option(help="What to do with the branches when nothing succeeds.")
    ] = Failure.abort
    keep_losers: Annotated[
        bool,
        typer.Option(
            "--keep-losers",
            help="Leave the branches of the other candidates open if there is a winner, for "
            "branching diff, and for branching commit --rebase. Not with --setup.",
        ),
    ] = False
    report: ReportOption = None
    quiet: QuietOption = False
    verbose: VerboseOption = False
    json: JsonOption = False


class Search:
    """One call of a pattern from the command line, open for the length of a `with`."""

    def __init__(
        self, command: str, options: SearchOptions, labels: Sequence[str] | None = None
    ) -> None:
        self.command = command
        self.options = options
        self._labels = labels
        self.refused = RefusedWrites()
        self._stack = ExitStack()
        self._space: Workspace
        self._isolation_options: dict[str, Any]

    def __enter__(self) -> Search:
        from branching.cli.progress import show_progress
        from branching.cli.workspace import owned_workspace
        from branching.runlog.run_log import RunLog

        options = self.options
        isolation = options.isolation()
        limits = options.group_limits()
        is_nested = self.command in _NESTED or (limits is not None and limits.disk is not None)
        if options.keep_losers and (is_nested or options.setup):
            raise UsageFault(
                "--keep-losers cannot be combined with --setup, a disk limit of the group or a "
                "search by levels: their branches are nested in one that is committed"
            )
        self._cluster = options.cluster(
            keeps_branches=options.keep_losers or options.on_error is not Failure.abort,
            has_group_limits=options.group_limits() is not None,
        )
        with ExitStack() as stack:
            report = stack.enter_context(ReportFile(options.report))
            self._space, owner = stack.enter_context(owned_workspace(options.workspace))
            report.check(self._space)
            self._isolation_options = {
                "workspace": self._space.seen_at,
                "owner": owner,
                **isolation,
                **options.place(self._space),
            }
            log = RunLog.of(self._space, self.command, keeps_store=True)
            stack.callback(lambda: report.collect(self._space, log.branches))
            stack.enter_context(log)
            show = stack.enter_context(
                show_progress(self._labels, quiet=options.quiet, verbose=options.verbose)
            )
            self._listener = log.and_then(self._reading_output(show))
            self._run_log = log
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    def _reading_output(self, listener: Callable[[Event], None]) -> Callable[[Event], None]:
        from branching.runlog.events import takes_blocks, taking_blocks

        def on_event(event: Event) -> None:
            if event.kind == "output":
                self.refused.read(event.text)
            listener(event)

        return taking_blocks(on_event) if takes_blocks(listener) else on_event

    @property
    def shows_table(self) -> bool:
        """Whether a table on the terminal shows the candidates, also after the end."""
        from branching.cli.progress import shows_table

        return shows_table(quiet=self.options.quiet, verbose=self.options.verbose)

    @property
    def how(self) -> dict[str, Any]:
        """The options that all patterns have."""
        options = self.options
        return {
            "timeout": options.timeout,
            "max_parallel": options.parallel,
            "commit": options.on_success is Success.commit,
            "only": options.select or (),
            "drop_rest": options.drop_rest,
            "setup": self.program(options.setup) if options.setup else None,
            "keep_failed": options.on_error is not Failure.abort,
            "keep_losers": options.keep_losers,
            "on_event": self._listener,
            "resource_limits": options.limits(),
            "group_limits": options.group_limits(),
            "runner": self._cluster,
        }

    def program(self, command: str | Sequence[str], *, score: bool = False) -> Program:
        """Returns a command as a candidate: a text for the shell, or a program's words."""
        from branching.patterns.command_candidate import Program

        return Program(*self._words(command), score=score, **self._named(command))

    def explainer(self, command: Sequence[str]) -> Program:
        """Returns a candidate that passes the end of its output on as feedback to the next."""
        from branching.patterns.command_candidate import FeedbackCandidate

        return FeedbackCandidate(*self._words(command), **self._named(command))

    def reader(self, command: str | None) -> Reader | None:
        """Returns a command whose output is the answer."""
        from branching.patterns.command_candidate import Reader

        return Reader(*self._words(command), **self._named(command)) if command else None

    def scorer(self, command: str | None) -> Scorer | None:
        """Returns a command that says what a branch is worth."""
        from branching.patterns.command_callbacks import Scorer

        if not command:
            return None
        return Scorer(*self._words(command), score=True, **self._named(command))

    def judge(self, command: str) -> Judge:
        """Returns a command that says which of two branches is the better."""
        from branching.patterns.command_callbacks import Judge

        return Judge(*self._words(command), **self._named(command))

    def expander(self, command: str) -> Expander:
        """Returns a command that says what to try next."""
        from branching.patterns.command_callbacks import Expander

        def make(text: str) -> Program:
            return self.program(text, score=True)

        return Expander(*self._words(command), make=make, **self._named(command))

    def run(
        self, pattern: Callable[[Workspace | Branch], SpeculationOutcome]
    ) -> SpeculationOutcome:
        """Calls the pattern. A signal ends it in order, unless there was a winner already."""
        from branching.cli.signals import run_interruptible

        def call() -> SpeculationOutcome:
            with self._run_log.controlled():
                outcome = pattern(self._space)
            if self.options.on_success is Success.abort and outcome.branch is not None:
                outcome.branch.abort()
            return outcome

        return run_interruptible(
            call,
            is_done=lambda outcome: outcome.winner is not None,
            hint=lambda: patch_hint(self._run_log.patched),
        )

    @staticmethod
    def _words(command: str | Sequence[str]) -> tuple[list[str]]:
        from branching.patterns.command_candidate import shell

        return (shell(command) if isinstance(command, str) else list(command),)

    def _named(self, command: str | Sequence[str]) -> dict[str, Any]:
        label = {"label": command} if isinstance(command, str) else {}
        return {**self._isolation_options, **label}
