"""`branching fork`: any programs in branches of one fork, one is merged."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from branching._caller import for_caller
from branching._exit_codes import EXIT_NOTHING_SUCCEEDED, EXIT_TIMEOUT
from branching.cli.budget_options import BudgetOptions
from branching.cli.error_handling import UsageFault, handle_errors
from branching.cli.option_groups import expand_option_groups
from branching.cli.options import (
    CandidatesOption,
    CommandArgument,
    JsonOption,
    MergeSelectOption,
    QuietOption,
    TimeoutOption,
    WorkspaceOption,
)
from branching.cli.output import counted, note_privileges, note_result, print_json
from branching.cli.report_file import ReportFile, ReportOption

if TYPE_CHECKING:
    from branching.agent.types import MergeResult
    from branching.cli.fork_command import ForkCommand, Plan

N_DEFAULT = 3


class Conflict(str, Enum):
    """What becomes of a path that somebody else changed since the fork."""

    keep = "keep"
    theirs = "theirs"
    fail = "fail"


@expand_option_groups
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
            help="Shell command that tests each branch that succeeded; `auto` finds the "
            "project's tests. Only a branch that passes is merged: without a judge, the "
            "first one.",
            show_default=False,
        ),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(
            metavar="CMD",
            help="Shell command that chooses the winner: BRANCHING_CASE describes the branches, "
            "BRANCHING_LABELS and BRANCHING_BRANCHES list their names and directories, one "
            "per line. Its last line of output is the winner's name.",
            show_default=False,
        ),
    ] = None,
    pick: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Merge this branch, even if others succeed, unless it fails the --test-command.",
            show_default=False,
        ),
    ] = None,
    on_conflict: Annotated[
        Conflict | None,
        typer.Option(
            help="For a path that was also changed in the workspace: keep the workspace's "
            "version (keep), take the branch's (theirs), or merge nothing and leave the "
            "fork open (fail). Such paths are listed, and branching log --patch has the "
            "branch's version. [default: keep]",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Resume a fork whose command was killed or whose merge was refused: choose "
            "among its successful branches, by the original options or new ones.",
            show_default=False,
        ),
    ] = None,
    rerun: Annotated[
        bool,
        typer.Option(
            "--rerun",
            help="With --resume: first run the interrupted branches again from the start.",
        ),
    ] = False,
    drop: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Drop a fork that was left open.", show_default=False),
    ] = None,
    select: MergeSelectOption = None,
    timeout: TimeoutOption = None,
    report: ReportOption = None,
    workspace: WorkspaceOption = None,
    quiet: QuietOption = False,
    json: JsonOption = False,
    *,
    budgets: BudgetOptions,
) -> None:
    """Run agents of any kind in parallel branches, compare them, and merge one.

    The workspace may change in the meantime: the merge compares each path at the fork, now, and
    in the winner. Give either one command N times (-- CMD), or several (-c CMD -c CMD). Without a
    judge and tests, the first branch that succeeds wins. Exit code: 0 merged, 1 no branch
    succeeded, 124 timeout.

    branching ls lists forks that were left open; branching log and branching watch show running
    agents.

    An agent cannot write to your home in a branch; point its state to $TMPDIR.

    Example: branching fork -n 3 --test-command auto -- sh -c
    'CLAUDE_CONFIG_DIR=$TMPDIR/claude claude -p "fix issue 7" --dangerously-skip-permissions'
    """
    with handle_errors(json=json):
        if pick is not None and judge is not None:
            raise UsageFault("--pick and --judge exclude each other; give one of them")
        said = {
            "pick": pick,
            "judge": judge,
            "tests": test_command,
            "conflict": on_conflict and on_conflict.value,
            "only": select,
        }
        choice = {name: value for name, value in said.items() if value is not None}
        again = resume or drop
        if again is None:
            plan = _plan(command, candidates, n, label, choice, timeout, budgets)
        elif (
            command or candidates or label or n is not None or timeout or budgets != BudgetOptions()
        ):
            raise UsageFault(
                "the commands, labels and budgets of an existing fork cannot be changed"
            )
        if rerun and resume is None:
            raise UsageFault("--rerun needs --resume ID")
        if resume is not None and drop is not None:
            raise UsageFault("--resume and --drop exclude each other; give one of them")
        if drop is not None and (choice or report):
            raise UsageFault(
                "--drop merges nothing: it takes no --report and no option that chooses a branch"
            )

        from branching.cli.fork_command import ForkCommand
        from branching.cli.fork_registry import ForkRegistry, orphaned_forks
        from branching.cli.workspace import opened_workspace

        with ExitStack() as stack:
            page = stack.enter_context(ReportFile(report))
            space = stack.enter_context(opened_workspace(workspace))
            page.check(space)
            kept = stack.enter_context(ForkRegistry(space))
            forking = ForkCommand(space, kept, quiet=quiet)
            stack.callback(lambda: page.collect(space, forking.logged_branches))
            is_undoable = space.branch_path == "/main" and space.fstype != "daxfs"
            merged = None
            if drop is not None:
                forking.drop(drop)
            elif resume is not None:
                merged = forking.resume(resume, changed=choice, is_rerun=rerun)
            else:
                notes = (
                    [kept.complaint]
                    if kept.complaint
                    else [each.note for each in orphaned_forks(space)]
                )
                for note in notes:
                    print(f"note: {for_caller(note)}", file=sys.stderr)
                merged = forking.fork(plan)
        if merged is not None:
            note_privileges(merged.privileged)
        is_dropped = drop is not None
        _tell(forking, merged, is_dropped=is_dropped, is_undoable=is_undoable, json=json)
        if merged is None and drop is None:
            raise typer.Exit(EXIT_TIMEOUT if forking.timed_out else EXIT_NOTHING_SUCCEEDED)


def _plan(
    command: list[str] | None,
    candidates: list[str] | None,
    n: int | None,
    label: list[str] | None,
    choice: dict[str, Any],
    timeout: float | None,
    budgets: BudgetOptions,
) -> Plan:
    """Returns what is asked for. UsageFault where that makes no sense."""
    from branching.cli.fork_command import Choice, Plan

    if bool(command) == bool(candidates):
        raise UsageFault("give either one command (-- CMD...) or candidates (-c CMD)")
    if candidates and n is not None:
        raise UsageFault("-n needs a single command; candidates given with -c run once each")
    commands: list[Any] = [*(candidates or [])] or [command] * (n or N_DEFAULT)
    labels = [*(label or []), *map(str, range(len(label or []), len(commands)))]
    if not all(each.strip() for each in labels):
        raise UsageFault("a label cannot be empty")
    if len(labels) > len(commands) or len(set(labels)) < len(labels):
        raise UsageFault("labels must be unique, with no more labels than branches")
    if choice.get("pick", labels[0]) not in labels:
        raise UsageFault(f"--pick names no branch; the branches are {', '.join(labels)}")
    return Plan(
        commands=dict(zip(labels, commands, strict=True)),
        choice=Choice(**choice),
        each=budgets.each(timeout),
        group=budgets.group(),
    )


def _tell(
    forking: ForkCommand,
    merged: MergeResult | None,
    *,
    is_dropped: bool,
    is_undoable: bool,
    json: bool,
) -> None:
    facts = forking.facts(merged)
    if json:
        print_json("fork", **facts)
        return
    for line in [] if is_dropped else forking.lines(merged):
        print(line)
    sys.stdout.flush()
    if is_dropped:
        note_result(f"dropped fork {facts['fork']}")
    elif merged is None:
        note_result("no branch was merged", good=False)
    else:
        count = len(merged.applied_paths) + len(merged.deleted_paths)
        undo = "undo: branching undo" if count and is_undoable else ""
        note_result(f"branch {merged.winner_label} won", f"merged {counted(count, 'path')}", undo)
