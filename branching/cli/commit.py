"""`branching commit`: a kept branch becomes part of its parent."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from branching.cli.activity import shown_activity
from branching.cli.error_handling import UsageFault, handle_errors
from branching.cli.options import (
    BranchArgument,
    DropRestOption,
    JsonOption,
    Policy,
    WorkspaceOption,
    not_blank,
)
from branching.cli.output import (
    change_facts,
    commit_parts,
    counted,
    note_forgotten,
    note_privileges,
    note_rest,
    note_result,
    paths_phrase,
    print_json,
    shortened_lines,
    warning_facts,
)
from branching.cli.workspace import opened_workspace


def commit(
    name: BranchArgument,
    workspace: WorkspaceOption = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="If the same paths were changed in the workspace, take the branch's version. A "
            "branch in which a command still runs is refused even then.",
        ),
    ] = False,
    skip: Annotated[
        bool,
        typer.Option(
            "--skip",
            help="If the same paths were changed in the workspace, keep the workspace's version; "
            "the branch stays open with its own.",
        ),
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            callback=not_blank,
            help="Commit these paths only; the branch stays open with the rest. Repeatable.",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            callback=not_blank,
            help="Leave these paths out; the branch stays open with them. Repeatable.",
        ),
    ] = None,
    drop_rest: DropRestOption = False,
    policy: Annotated[
        Policy | None,
        typer.Option(
            help="Conflict policy for the siblings: first-winner makes them stale; snapshot "
            "keeps those that wrote no committed path; serializable keeps those that "
            "neither wrote nor read one. [default: the mount's]",
            show_default=False,
        ),
    ] = None,
    rebase: Annotated[
        bool,
        typer.Option(
            "--rebase",
            help="If the branch is stale, rebase it onto the workspace's present state before "
            "the commit. Paths that both sides changed are a conflict.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be committed, and change nothing.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Commit an open branch, all or nothing, or some of its paths.

    The branch is closed, unless changed paths remain: it then stays open with these.

    Example: branching commit run-1a2b3c4d
    """
    with handle_errors(json=json):
        if force and skip:
            raise UsageFault("--force and --skip exclude each other; give one of them")
        with opened_workspace(workspace) as space:
            branch = space.reopen(name)
            with shown_activity(f"committing {name}"):
                changes = branch.commit(
                    force=force,
                    skip=skip,
                    only=only or (),
                    exclude=exclude or (),
                    drop_rest=drop_rest,
                    policy=policy.value if policy else None,
                    rebase=rebase,
                    dry_run=dry_run,
                )
        note_forgotten(branch.forgotten, is_dry_run=dry_run)
        note_privileges(changes)
        if not dry_run:
            note_rest(name, branch.remaining)
        action = "none" if dry_run else "committed"
        if json:
            facts = change_facts(changes)
            warnings = warning_facts(changes)
            remaining = branch.remaining
            print_json(
                "commit",
                branch=name,
                action=action,
                changes=facts,
                commit=branch.commit_id,
                remaining=remaining,
                **warnings,
            )
        elif dry_run:
            print("".join(f"{line}\n" for line in shortened_lines(changes)), end="")
            sys.stdout.flush()
            rest = f"{counted(branch.remaining, 'path')} not committed" if branch.remaining else ""
            note_result(f"would commit {paths_phrase(changes)}", rest)
        else:
            note_result(*commit_parts(changes, can_undo=branch.commit_id is not None))
