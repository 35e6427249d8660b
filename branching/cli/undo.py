"""`branching undo`, `redo`, `save` and `restore`: ways through the history of commits."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from branching.cli.activity import shown_activity
from branching.cli.error_handling import UsageFault, handle_errors
from branching.cli.history import commit_table
from branching.cli.options import JsonOption, WorkspaceOption
from branching.cli.output import (
    change_facts,
    counted,
    note_result,
    paths_phrase,
    print_json,
    shortened_lines,
)
from branching.cli.show import commit_id
from branching.cli.table import note_empty, table_lines, time_text
from branching.cli.workspace import opened_workspace
from branching.errors import BranchingError

if TYPE_CHECKING:
    from branching.fs import CommitRecord, Reversal, Workspace

_ForceOption = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Proceed even if the same paths were changed since, or branches are open. Later "
        "changes are set aside; open branches become stale.",
    ),
]
_DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be changed, and change nothing.")
]
_OTHER = {"undo": "redo", "redo": "undo"}
_DID = {"undo": "undid", "redo": "redid"}
_DONE = {"undo": "undone", "redo": "redone"}


def undo(
    commit: Annotated[
        str | None,
        typer.Argument(
            metavar="[COMMIT]",
            help="Id of a commit, as branching history lists it, or the name of its branch. "
            "[default: the last commit]",
            show_default=False,
        ),
    ] = None,
    workspace: WorkspaceOption = None,
    through: Annotated[
        bool,
        typer.Option(
            "--through", help="Undo all later commits first, one by one, the last one first."
        ),
    ] = False,
    force: _ForceOption = False,
    dry_run: _DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Undo the last commit to the workspace, all or nothing. Repeat it to undo earlier ones.

    With COMMIT, only that commit is undone: the command is refused if it is not the last one,
    unless --through is given. If the same paths were changed since, these are listed and nothing
    is undone.

    Example: branching undo --dry-run
    """
    with handle_errors(json=json):
        if through and commit is None:
            raise UsageFault("--through needs a commit; branching history lists them")
        with opened_workspace(workspace) as space:
            if commit is None:
                reversals = [space.undo(force=force, dry_run=dry_run)]
                commits = [reversals[0].commit]
            else:
                commits = _commits_to_undo(space.history(), commit, through=through)
                reversals = _reverse(space, "undo", commits, force=force, dry_run=dry_run)
        _tell("undo", commits, reversals, dry_run=dry_run, json=json)


def redo(
    workspace: WorkspaceOption = None,
    force: _ForceOption = False,
    dry_run: _DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Redo the commit that was undone last, all or nothing.

    If the same paths were changed since, these are listed and nothing is redone.

    Example: branching redo --dry-run
    """
    with handle_errors(json=json):
        with opened_workspace(workspace) as space:
            reversal = space.redo(force=force, dry_run=dry_run)
        _tell("redo", [reversal.commit], [reversal], dry_run=dry_run, json=json)


def save(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="Name of the checkpoint; an existing one of that name is replaced. [default: list "
            "the checkpoints]",
            show_default=False,
        ),
    ] = None,
    workspace: WorkspaceOption = None,
    json: JsonOption = False,
) -> None:
    """Save the workspace's place in the history as a checkpoint, for branching restore.

    A checkpoint copies no files. Restoring it undoes the commits since; so they must still be in
    the history, which holds 10 commits or 1 GiB, and changes made in the directory without a commit
    are not restored. branching prune deletes all checkpoints.

    Example: branching save before-upgrade
    """
    with handle_errors(json=json):
        from branching.fs.checkpoints import Checkpoints

        if name is not None and not name.strip():
            raise UsageFault("the name of a checkpoint cannot be empty")
        with opened_workspace(workspace) as space:
            checkpoints = Checkpoints(space)
            saved = checkpoints.all() if name is None else [checkpoints.save(name)]
        if json:
            print_json("save", checkpoints=[vars(each) for each in saved])
        elif name is not None:
            note_result(f"saved checkpoint {name}", f"restore: branching restore {name}")
        else:
            if not saved:
                note_empty("no checkpoint is saved")
            rows = [(each.name, time_text(each.created), str(each.commit or "")) for each in saved]
            for line in table_lines(("NAME", "SAVED", "COMMIT"), rows):
                print(line)


def restore(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Name of the checkpoint.", show_default=False),
    ],
    workspace: WorkspaceOption = None,
    force: _ForceOption = False,
    dry_run: _DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Return to a checkpoint: undo the commits since, the last one first, each all or nothing.

    If the workspace was set back beyond the checkpoint, the commits up to it are redone. Changes
    made in the directory without a commit stay; where a commit changed the same paths, the command
    stops there. branching redo repeats the undone commits.

    Example: branching restore before-upgrade
    """
    with handle_errors(json=json):
        from branching.fs.checkpoints import Checkpoints

        with opened_workspace(workspace) as space:
            route = Checkpoints(space).route(name)
            verb, commits = ("redo", route.redo) if route.redo else ("undo", route.undo)
            reversals = _reverse(space, verb, commits, force=force, dry_run=dry_run)
        _tell(verb, commits, reversals, dry_run=dry_run, json=json, command="restore")


def _commits_to_undo(
    history: list[CommitRecord], text: str, *, through: bool
) -> list[CommitRecord]:
    """Returns the commits to undo for the one that `text` names, the last one first.

    Raises:
        UsageFault: It is not in the history, is undone, or later ones would have to be undone, too.
    """
    wanted = commit_id(history, text)
    commits = [each for each in reversed(history) if each.undone is None and each.id >= wanted]
    if not commits or commits[-1].id != wanted:
        raise UsageFault(f"commit {wanted} is undone already")
    if len(commits) > 1 and not through:
        raise UsageFault(
            f"commit {wanted} is not the last one: {counted(len(commits) - 1, 'commit')} came "
            f"later. branching undo {wanted} --through undoes these too"
        )
    return commits


def _reverse(
    space: Workspace, verb: str, commits: list[CommitRecord], *, force: bool, dry_run: bool
) -> list[Reversal]:
    """Undoes or redoes commits in this order. A dry run is possible of the first one only."""
    call = space.undo if verb == "undo" else space.redo
    done: list[Reversal] = []
    for commit in commits[:1] if dry_run else commits:
        try:
            with shown_activity(f"{verb}ing the commit of {commit.branch}"):
                done.append(call(commit.id, force=force, dry_run=dry_run))
        except BranchingError as error:
            if done:
                count = counted(len(done), "commit")
                held = f"before that, {count} {'was' if len(done) == 1 else 'were'} {_DONE[verb]}"
                error.hint = f"{error.hint}; {held}" if error.hint else held
            raise
    return done


def _tell(
    verb: str,
    commits: list[CommitRecord],
    reversals: list[Reversal],
    *,
    dry_run: bool,
    json: bool,
    command: str | None = None,
) -> None:
    """Prints the result of a command that undoes or redoes `commits`."""
    action = "none" if dry_run or not commits else _DONE[verb]
    changes = [change for reversal in reversals for change in reversal.changes]
    if json:
        last = reversals[-1].commit if reversals else None
        print_json(
            command or verb,
            action=action,
            commit=None if last is None else vars(last),
            commits=[vars(commit) for commit in commits],
            changes=change_facts(changes),
        )
        return
    if dry_run and len(commits) > 1:
        print("\n".join(commit_table(commits)))
    else:
        print("".join(f"{line}\n" for line in shortened_lines(changes)), end="")
    sys.stdout.flush()
    if not commits:
        note_result("nothing to restore: the workspace is at the checkpoint")
        return
    one = f"the commit of {commits[0].branch}"
    names = one if len(commits) == 1 else counted(len(commits), "commit")
    what = f"would {verb} {names}" if dry_run else f"{_DID[verb]} {names}"
    paths = "" if dry_run and len(commits) > 1 else paths_phrase(changes)
    note_result(what, paths, "" if dry_run else f"{_OTHER[verb]}: branching {_OTHER[verb]}")
