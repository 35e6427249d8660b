"""One command in one branch: what `branching run` does once its options are read.

Neither this module nor what it imports needs Typer: `short_run` runs common command lines without.
"""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from branching._exit_codes import EXIT_CANNOT_EXECUTE, EXIT_NOT_FOUND, EXIT_TIMEOUT
from branching.cli.activity import shown_activity
from branching.cli.error_handling import UsageFault, note
from branching.cli.hints import RefusedWrites, advice
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
from branching.cli.signals import run_interruptible
from branching.cli.workspace import owned_workspace, start_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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


def _default_place(workspace: Workspace) -> dict[str, Any]:
    return {"directory": start_directory(workspace)}


class RunPlan(NamedTuple):
    """What to run, and how; the defaults are those of the command line."""

    command: list[str]
    workspace: Path | None = None
    branch: str | None = None
    """Name of the branch; None makes one up."""
    on_success: End = End.commit
    on_error: End = End.abort
    ask: bool = False
    timeout: float | None = None
    setup: str | None = None
    select: tuple[str, ...] = ()
    drop_rest: bool = False
    quiet: bool = False
    verbose: bool = False
    json: bool = False
    no_log: bool = False
    limits: ResourceLimits | None = None
    isolation: Mapping[str, Any] = MappingProxyType({})
    """Arguments of the `Program`."""
    place: Callable[[Workspace], dict[str, Any]] = _default_place
    """Returns those that depend on the open workspace."""

    @property
    def stdout(self) -> int:
        """The descriptor for the command's standard output: stderr where stdout has a document."""
        return 2 if self.json else 1

    def choose(self, runner: Runner, attempt: Attempt) -> End:
        """Returns which end the branch takes."""
        if self.ask:
            runner.lift_deadline()

            def ask() -> bool:
                for line in shortened_lines(attempt.branch.diff(), sys.stderr):
                    note(line)
                return _asked()

            return End.commit if runner.consult(attempt, ask) else End.abort
        return self.on_success if attempt.succeeded else self.on_error


def run_command(plan: RunPlan) -> int:
    """Runs the command, ends its branch, prints the result, and returns the exit code."""
    if plan.ask and not sys.stdin.isatty():
        raise UsageFault("--ask needs a terminal, and standard input is not one")
    name = f"run-{os.urandom(4).hex()}" if plan.branch is None else _checked(plan.branch)
    code, action, how, outcome, hints = _run(plan, name)
    changes = outcome.changes
    note_privileges(changes)
    if outcome.branch is not None:
        note_rest(outcome.branch.name, outcome.remaining)
    if plan.json:
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
        return code
    if not plan.quiet:
        committed = commit_parts(changes, can_undo=outcome.commit_id is not None)
        note_result(*_result_parts(code, how, action, name, committed), good=code == 0)
    if plan.verbose:
        for line in change_lines(changes, sys.stderr):
            note(f"  {line}")
    for hint in hints:
        note(f"Hint: {hint}")
    return code


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


def _checked(name: str) -> str:
    from branching.fs.branch import check_name

    try:
        check_name(name)
    except ValueError as error:
        raise UsageFault(str(error)) from error
    return name


def _run(plan: RunPlan, name: str) -> tuple[int, str, str | None, SpeculationOutcome, list[str]]:
    """Returns the exit code, what became of the branch, how the command ended, what came of it,
    and hints."""
    from branching.fs import automount

    automount.while_mounting = _load
    with owned_workspace(plan.workspace) as (workspace, owner), ExitStack() as stack:
        from branching.cli.output_capture import capture_output
        from branching.patterns.command_candidate import Program, shell
        from branching.patterns.runner import Runner, Stopped
        from branching.runlog.run_log import COMMAND_SUFFIX

        isolation_options: dict[str, Any] = {
            "workspace": workspace.seen_at,
            "owner": owner,
            "tells_output": False,
            **plan.isolation,
            **plan.place(workspace),
        }
        copy = (
            stack.enter_context(capture_output(workspace, owner, plan.stdout))
            if not plan.no_log
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
                    name + COMMAND_SUFFIX if setup and purpose != "setup" else name
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
                end = plan.choose(runner, attempt)
                if end is End.commit:
                    _commit(runner, attempt)
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
            kept=name if _ACTIONS[end] == "kept" else None,
        )
        return code, _ACTIONS[end], how, outcome, hints


def _load() -> None:
    """Loads the modules that are needed when the workspace is open."""
    import branching.cli.output_capture
    import branching.patterns.runner  # noqa: F401


def _commit(runner: Runner, attempt: Attempt) -> None:
    with shown_activity("committing"):
        runner.commit(attempt)
    note_forgotten(runner.forgotten)


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
