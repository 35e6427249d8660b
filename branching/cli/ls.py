"""`branching ls`: the open branches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from branching.cli.error_handling import handle_errors, note
from branching.cli.options import JsonOption, WorkspaceOption
from branching.cli.output import print_json
from branching.cli.table import note_empty, table_lines, time_text
from branching.cli.workspace import opened_workspace
from branching.errors import BranchingError

if TYPE_CHECKING:
    from branching.fs import BranchRecord, Workspace


def ls(workspace: WorkspaceOption = None, json: JsonOption = False) -> None:
    """List the open branches, the oldest first: name, state, age, path in the tree.

    Example: branching ls
    """
    with handle_errors(json=json):
        with opened_workspace(workspace) as space:
            records = space.branches()
            notes = [*_notes(space, records), *_forks_left(space)] if records else []
        for text in notes:
            note(f"note: {text}")
        if json:
            print_json(
                "ls",
                branches=[
                    {
                        "name": record.name,
                        "state": record.state,
                        "frozen": record.frozen,
                        "path": str(record.path),
                        "branch_path": record.branch_path,
                        "created": record.created,
                        "disk_limit": record.disk_limit,
                        "disk_used": record.disk_used,
                    }
                    for record in records
                ],
            )
            return
        if not records:
            note_empty("no branch is open")
        rows = [
            (record.name, record.state, time_text(record.created), record.branch_path)
            for record in records
        ]
        for line in table_lines(("NAME", "STATE", "CREATED", "PLACE"), rows):
            print(line)


def _forks_left(space: Workspace) -> list[str]:
    """Tells of forks that nobody attends."""
    if space.store is None or not (space.store / "agents").is_dir():
        return []
    from branching.cli.fork_registry import orphaned_forks

    try:
        return [fork.note for fork in orphaned_forks(space)]
    except BranchingError as error:
        return [error.message]


def _notes(space: Workspace, records: list[BranchRecord]) -> list[str]:
    """Returns what is to be said of branches whose programs were killed."""
    from branching.fs.branch_leases import orphaned_branches
    from branching.runlog.run_log import lost

    notes = []
    dropped = [record.name for record in orphaned_branches(space, records)]
    if dropped:
        notes.append(
            f"left by an MCP server that was killed: {', '.join(dropped)}. Commit or abort them: "
            "the next server drops them"
        )
    found: dict[str, list[str]] = {}
    killed = (
        {} if space.store is None else {each.branch: each for each in lost(space.store / "logs")}
    )
    for record in records:
        entry = killed.get(record.name)
        # Another branch may have had the name before.
        if entry and record.name not in dropped and entry.started >= record.created - 1:
            found.setdefault(entry.command, []).append(record.name)
    found.pop("fork", None)  # tells of itself
    if talked := found.pop("chat", None):
        notes.append(f"left by a chat: {', '.join(talked)}. The next branching chat resumes them")
    if given_up := [name for names in found.values() for name in names]:
        notes.append(
            "open branches whose command did not record its end (it was killed, or the disk was "
            f"full): {', '.join(given_up)}. Review them with branching diff NAME, then branching "
            "commit NAME or branching abort NAME"
        )
    return notes
