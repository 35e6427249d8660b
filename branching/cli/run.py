"""`branching run`: one command in one branch."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from branching._exit_codes import EXIT_CANNOT_EXECUTE, EXIT_NOT_FOUND, EXIT_TIMEOUT
from branching.cli.error_handling import UsageFault, handle_errors, note
from branching.cli.hints import RefusedWrites, advice
from branching.cli.isolation_options import IsolationOptions
from branching.cli.limit_options import LimitOptions
from branching.cli.option_groups import expand_option_groups
from branching.cli.options import (
    CommandArgument,
    DropRestOption,
    JsonOption,
    SelectOption,
    SetupOption,
    TimeoutOption,
    WorkspaceOption,
)
from branching.cli.output import (
    change_facts,
    change_lines,
    commit_parts,
    ended_how,
    note_forgotten,
    note_privileges,
    note_rest,
    note_result,
    print_json,
    shortened_lines,
    warning_facts,
)
from branching.cli.workspace import owned_workspace

if TYPE_CHECKING:
    from collections.abc import Callable

    from branching.fs import Workspace
    from branching.patterns import SpeculationOutcome
    from branching.patterns.attempt import Attempt
    from branching.patterns.runner import Runner
    from branching.process import ResourceLimits


FORKS_MAX = 5
"""How often a branch is forked for a command that could not be started, as a sibling was committed
at that moment."""


class End(str, Enum):
    """What becomes of the branch. `none` is an older word for `keep`."""

    commit = "commit"
    keep = "keep"
    abort = "abort"
    none = "none"


_ACTIONS = {End.commit: "committed", End.keep: "kept", End.none: "kept", End.abort: "aborted"}


_ENDS_BY_ITSELF = (None, "exit", "signal", "timeout", "cancelled")
"""Of these the exit code says enough; other ends are told in words."""


@expand_option_groups
def run(
    command: CommandArgument = None,
    workspace: WorkspaceOption = None,
    branch: Annotated[
        str | None,
        typer.Option(
            "-b",
            "--branch",
            metavar="NAME",
            help="Name of the branch. [default: run- and 8 hex digits]",
            show_default=False,
        ),
    ] = None,
    on_success: Annotated[
        End, typer.Option(help="What to do with the branch when the command succeeds.")
    ] = End.commit,
    on_error: Annotated[
        End, typer.Option(help="What to do with the branch when it fails.")
    ] = End.abort,
    ask: Annotated[
        bool, typer.Option("--ask", help="Ask whether to commit, whatever the exit code.")
    ] = False,
    timeout: TimeoutOption = None,
    setup: SetupOption = None,
    select: SelectOption = None,
    drop_rest: DropRestOption = False,
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="Do not print the line with the outcome.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="List each path that was committed.")
    ] = False,
    json: JsonOption = False,
    no_log: Annotated[
        bool,
        typer.Option(
            "--no-log",
            help="Keep nothing of what the command prints; a terminal is lent to it as it is.",
        ),
    ] = False,
    *,
    limits: LimitOptions,
    isolation: IsolationOptions,
) -> None:
    """Run a command in a branch: commit if it succeeds, abort if it fails.

    The exit code is the command's own: 126 if it cannot be executed, 127 if it is not found,
    128+n if signal n killed it; 124 if the time was over.

    At the end one line on standard error says what was done with the branch, and how the command
    ended if it failed. Standard output has what the command prints, and nothing else.

    What it prints goes where it would go without branching, and a copy is kept for branching log,
    as long as the workspace keeps anything: a mount, a branch, a commit. On a terminal it has one
    of its own, with all keys.

    Example: branching run -- make test
    """
    with handle_errors(json=json):
        if not command:
            raise UsageFault("no command specified; use -- CMD...")
        if ask and not sys.stdin.isatty():
            raise UsageFault("--ask needs a terminal to ask on, and standard input is none")
        name = f"run-{secrets.token_hex(4)}" if branch is None else _checked(branch)
        policy = _Policy(on_success=on_success, on_error=on_error, ask=ask)
        plan = _Plan(
            command=command,
            name=name,
            policy=policy,
            timeout=timeout,
            setup=setup,
            select=tuple(select or ()),
            drop_rest=drop_rest,
            limits=limits.limits(),
            isolation=isolation.isolation(),
            place=isolation.place,
            is_stdout_ours=json,
            is_logged=not no_log,
        )
        code, action, how, outcome, hints = _run(plan, workspace)
        changes = outcome.changes
        note_privileges(changes)
        if outcome.branch is not None:
            note_rest(outcome.branch.name, outcome.remaining)
        if json:
            print_json(
                "run",
                branch=name,
                exit_code=code,
                action=action,
                ended=how,
                changes=change_facts(changes),
                commit=outcome.commit_id,
                remaining=outcome.remaining,
                **warning_facts(changes),
            )
        else:
            if not quiet:
                committed = commit_parts(changes, can_undo=outcome.commit_id is not None)
                note_result(*_result_parts(code, how, action, name, committed), good=code == 0)
            if verbose:
                for line in change_lines(changes, sys.stderr):
                    note(f"  {line}")
            for hint in hints:
                note(f"Hint: {hint}")
        raise typer.Exit(code)


def _result_parts(
    code: int, how: str | None, action: str, name: str, committed: list[str]
) -> list[str]:
    """Returns the parts of the line with the result."""
    end = f"exit code {code}" if code else ""
    if how == "timeout":
        end = f"timed out (exit code {code})"
    if action == "committed":
        return [end, *committed]
    if action == "kept":
        return [end, f"kept branch {name}", f"commit: branching commit {shlex.quote(name)}"]
    return [end, "aborted, nothing was changed"]


@dataclass(frozen=True, kw_only=True)
class _Policy:
    """Which end the branch takes."""

    on_success: End
    on_error: End
    ask: bool

    def choose(self, runner: Runner, attempt: Attempt) -> End:
        if self.ask:
            runner.lift_deadline()

            def ask() -> bool:
                for line in shortened_lines(attempt.branch.diff(), sys.stderr):
                    note(line)
                return _asked()

            return End.commit if runner.consult(attempt, ask) else End.abort
        return self.on_success if attempt.succeeded else self.on_error


def _checked(name: str) -> str:
    from branching.fs.branch import check_name

    try:
        check_name(name)
    except ValueError as error:
        raise UsageFault(str(error)) from error
    return name


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What to run, and how."""

    command: list[str]
    name: str
    policy: _Policy
    timeout: float | None
    setup: str | None
    select: tuple[str, ...]
    drop_rest: bool
    limits: ResourceLimits | None
    isolation: dict[str, Any]
    place: Callable[[Workspace], dict[str, Any]]
    is_stdout_ours: bool
    """The command's output goes to stderr, for stdout is for the document."""
    is_logged: bool

    @property
    def stdout(self) -> int:
        """The descriptor for the command's standard output."""
        return 2 if self.is_stdout_ours else 1


def _run(
    plan: _Plan, path: Path | None
) -> tuple[int, str, str | None, SpeculationOutcome, list[str]]:
    """Returns the exit code, what became of the branch, how the command ended, what came of it,
    and hints."""
    from branching.cli.output_capture import capture_output
    from branching.cli.signals import run_interruptible
    from branching.patterns.command_candidate import Program, shell
    from branching.patterns.runner import Runner, Stopped
    from branching.runlog.run_log import COMMAND_SUFFIX

    with owned_workspace(path) as (workspace, owner), ExitStack() as stack:
        isolation_options: dict[str, Any] = {
            "workspace": workspace.seen_at,
            "owner": owner,
            "tells_output": False,
            **plan.isolation,
            **plan.place(workspace),
        }
        copy = (
            stack.enter_context(capture_output(workspace, owner, plan.stdout))
            if plan.is_logged
            else None
        )
        if copy is None:
            outputs: dict[str, Any] = {"stdout": plan.stdout}
            on_stderr: dict[str, Any] = {"stdout": 2}
        else:
            tee = copy.tee
            outputs = {"stdout": tee.stdout, "stderr": tee.stderr, "terminal": tee.terminal}
            on_stderr = dict.fromkeys(("stdout", "stderr"), tee.pipe(2)) if plan.setup else {}
        program = Program(plan.command, inherit_stdin=True, **outputs, **isolation_options)
        setup = None
        if plan.setup:
            setup = Program(shell(plan.setup), **on_stderr, **isolation_options)

        def call() -> tuple[int, End, str | None, SpeculationOutcome] | None:
            for _ in range(FORKS_MAX - 1):
                try:
                    return fork_and_run()
                except _Outrun:
                    pass
            return fork_and_run(is_last=True)

        def fork_and_run(
            *, is_last: bool = False
        ) -> tuple[int, End, str | None, SpeculationOutcome] | None:
            with Runner(
                workspace,
                # After a setup the branch that stays is the one the setup was run in.
                name=lambda purpose: (
                    plan.name + COMMAND_SUFFIX if setup and purpose != "setup" else plan.name
                ),
                timeout=plan.timeout,
                setup=setup,
                only=plan.select,
                drop_rest=plan.drop_rest,
                limits=plan.limits,
                on_event=None if copy is None else copy.on_event,
                # Commands that run at the same time and change other paths are all committed.
                policy=workspace.concurrent_policy,
                ends_with_process=False,  # it is one piece of work, and its log tells of it
            ) as runner:
                attempt = runner.start(program)
                try:
                    runner.finish(attempt)
                    if not is_last and setup is None and _is_outrun(attempt):
                        raise _Outrun
                    if copy is not None:
                        runner.consult(attempt, copy.tee.finish)
                except Stopped:
                    if runner.is_cancelled:
                        raise
                    runner.stop()
                code = _exit_code(attempt)
                end = plan.policy.choose(runner, attempt)
                if end is End.commit:
                    runner.commit(attempt)
                    note_forgotten(runner.forgotten)
                elif end is not End.abort:
                    runner.keep(attempt)
                how = ended_how(attempt.answer.value, attempt.state)
                return code, end, how, runner.outcome()
            return None  # stopped by a signal

        done = run_interruptible(call, is_done=lambda done: done is not None)
        assert done is not None, "without a value the call was stopped, and that is raised"
        code, end, how, outcome = done
        hints = advice(
            plan.command,
            code,
            workspace.base,
            refused=RefusedWrites() if copy is None else copy.refused,
            has_started=how != "error" or code not in (EXIT_CANNOT_EXECUTE, EXIT_NOT_FOUND),
            kept=plan.name if _ACTIONS[end] == "kept" else None,
        )
        return code, _ACTIONS[end], how, outcome, hints


class _Outrun(Exception):
    """Another command was committed before this one was started."""


def _is_outrun(attempt: Attempt) -> bool:
    """Returns whether nothing ran, because a sibling was committed while the sandbox was made."""
    from branching.errors import NamespaceError

    return isinstance(attempt.answer.exception, NamespaceError) and attempt.branch.is_stale()


def _exit_code(attempt: Attempt) -> int:
    if attempt.state == "timed_out":
        return EXIT_TIMEOUT
    if attempt.state == "error" and attempt.answer.exception is not None:
        raise attempt.answer.exception  # no process could be made: not the command's doing
    if ended_how(attempt.answer.value) not in _ENDS_BY_ITSELF:
        print(f"error: {attempt.answer.error}", file=sys.stderr, flush=True)
    return attempt.answer.exit_code


def _asked() -> bool:
    # Not through sys.stdin: a thread left waiting in it would hold its lock at exit.
    while True:
        print("Commit changes? [y/n] ", end="", file=sys.stderr, flush=True)
        answer = os.read(0, 1024)
        if not answer or answer.strip().lower() in (b"n", b"no"):
            return False
        if answer.strip().lower() in (b"y", b"yes"):
            return True
