"""`branching create` and `branching close`: branches that other programs use by path."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from branching.cli.error_handling import handle_errors, note, refuse_in_container
from branching.cli.options import JsonOption, WorkspaceOption
from branching.cli.output import note_result, print_json
from branching.cli.workspace import opened_workspace

if TYPE_CHECKING:
    from branching.fs import Workspace


def create(
    name: Annotated[
        str, typer.Argument(metavar="BRANCH", help="Name of the new branch.", show_default=False)
    ],
    workspace: WorkspaceOption = None,
    exist_ok: Annotated[
        bool,
        typer.Option("--exist-ok", help="If the branch is open already, print its path."),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Create a branch and print the path of its directory, for an editor, an agent or a script.

    The directory is mounted until branching close, or a reboot. The branch is kept until
    branching commit or branching abort. A program that uses the directory by its path is not in a
    sandbox: it can reach other files, too.

    Example: branching create idea
    """
    with handle_errors(json=json):
        refuse_paths_in_container("create")
        with opened_workspace(workspace) as space:
            path = create_mounted(space, name, exist_ok=exist_ok)
        if json:
            print_json("create", branch=name, path=str(path), action="kept")
        else:
            print(path, flush=True)
            note_result(f"branch {name} is mounted", "unmount: branching close")


def close(workspace: WorkspaceOption = None, json: JsonOption = False) -> None:
    """Unmount what branching create has mounted. Open branches are kept.

    A directory is unmounted when the last command that uses it ends. A program that has a file or
    its working directory there keeps it busy, which is an error.

    Example: branching close
    """
    with handle_errors(json=json):
        refuse_paths_in_container("close")
        with opened_workspace(workspace) as found:
            base, point = found.base, found.root
        is_mounted = close_mount(base)
        if json:
            print_json("close", base=str(base), mounted=is_mounted)
        elif is_mounted:
            note(f"other commands use {point}; it is unmounted when the last of them ends")
        else:
            note_result(f"unmounted {base}; its open branches are kept")


def refuse_paths_in_container(command: str) -> None:
    """Raises UsageFault in a container of branching-docker: its mounts are not the host's."""
    refuse_in_container(
        f"a branch of the container has no path on the host: {command} needs branching on the "
        "host; branching-docker shell opens a shell in a branch"
    )


def create_mounted(space: Workspace, name: str, *, exist_ok: bool) -> Path:
    """Creates a branch in a mount that stays, and returns its directory.

    Args:
        space: The workspace.
        name: Name of the branch.
        exist_ok: Take an open branch of that name.

    Raises:
        BranchingError: There is no new branch. A mount that was to stay before stays.
    """
    from branching.fs.automount import is_temporary

    is_open = exist_ok and any(record.name == name for record in space.branches())
    branch = space.reopen(name) if is_open else space.branch(name, on_success=None)
    with nullcontext() if is_open else branch:
        if is_temporary(space.root):
            space.keep_mounted()
        return branch.path


def close_mount(base: Path) -> bool:
    """Lets the mount of `base` go with its last user; returns whether others still use it.

    Raises:
        MountError: It was mounted by hand, or it is busy: then the next command unmounts it.
    """
    from branching._linux.mountinfo import read_mounts
    from branching.fs import Workspace

    with Workspace.open(base) as space:
        space.keep_mounted(False)
        point = space.root
    return any(mount.directory == point for mount in read_mounts())
