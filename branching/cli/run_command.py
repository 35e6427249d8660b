"""One command in one branch: what `branching run` does once its options are read.

    cli.main
      read_short_run          run_plan: the options. All but common ones: Typer, cli.run
      run_command             opens the workspace, prints the result
        run_in_branch         branch_run: forks the branch, commits, keeps or aborts it
          Program             patterns.command_candidate: environment, sandbox and limits
            Command.run       process.command: supervises the process, forwards its output
              launcher.start  process.sandbox.launcher: starts `branchfs sandbox`, which executes

No module on this way needs Typer. `branch_run` and those below it are loaded while the directory is
mounted.
"""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import ExitStack

from branching._exit_codes import EXIT_CANNOT_EXECUTE, EXIT_NOT_FOUND
from branching.cli.error_handling import UsageFault, note
from branching.cli.hints import advice
from branching.cli.output import (
    change_facts,
    change_lines,
    commit_parts,
    note_privileges,
    note_rest,
    note_result,
    print_json,
    warning_facts,
)
from branching.cli.run_plan import End, Result, RunPlan
from branching.cli.workspace import owned_workspace

_ACTIONS = {End.commit: "committed", End.keep: "kept", End.none: "kept", End.abort: "aborted"}


def run_command(plan: RunPlan) -> int:
    """Runs the command, ends its branch, prints the result, and returns the exit code."""
    if plan.ask and not sys.stdin.isatty():
        raise UsageFault("--ask needs a terminal, and standard input is not one")
    name = f"run-{os.urandom(4).hex()}" if plan.branch is None else _checked(plan.branch)
    result, hints = _run(plan, name)
    code, how, changes = result.exit_code, result.how, result.changes
    action = _ACTIONS[result.end]
    note_privileges(changes)
    note_rest(result.rest, result.remaining)
    if plan.json:
        print_json(
            "run",
            branch=name,
            exit_code=code,
            action=action,
            ended=how,
            changes=change_facts(changes),
            commit=result.commit_id,
            remaining=result.remaining,
            **warning_facts(changes),
        )
        return code
    if not plan.quiet:
        committed = commit_parts(changes, can_undo=result.commit_id is not None)
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


def _run(plan: RunPlan, name: str) -> tuple[Result, list[str]]:
    """Opens the workspace, runs the command in branch `name`, and returns the result and hints."""
    with (
        owned_workspace(plan.workspace, while_mounting=_load) as (workspace, owner),
        ExitStack() as stack,
    ):
        from branching.cli.branch_run import run_in_branch

        result, refused = run_in_branch(plan, name, workspace, owner, stack)
        if result.exit_code == 0:
            return result, []
        hints = advice(
            plan.command,
            result.exit_code,
            workspace.base,
            refused=refused,
            has_started=result.how != "error"
            or result.exit_code not in (EXIT_CANNOT_EXECUTE, EXIT_NOT_FOUND),
            kept=name if _ACTIONS[result.end] == "kept" else None,
        )
        return result, hints


def _load() -> None:
    """Loads the modules that are needed when the workspace is open."""
    import branching.cli.branch_run  # noqa: F401
