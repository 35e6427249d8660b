"""`branching load`: a branch from a file."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from branching.cli.error_handling import UsageFault, handle_errors, note
from branching.cli.options import STANDARD_STREAM, JsonOption, WorkspaceOption
from branching.cli.output import note_result, print_json
from branching.cli.workspace import opened_workspace


def load(
    name: Annotated[
        str, typer.Argument(metavar="BRANCH", help="Name of the new branch.", show_default=False)
    ],
    archive: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            help="The archive, or - for standard input. [default: standard input]",
            show_default=False,
        ),
    ] = None,
    workspace: WorkspaceOption = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Load it also over paths that have changed since it was made."
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Make a branch of an archive that branching export wrote, or of any OCI layer.

    An archive that is damaged, or leads out of the workspace, makes nothing. Neither does one that
    was made against other content: the paths that have changed since are listed. What to do with
    the branch comes after: branching diff, commit, abort.

    Example: branching load fix fix.tar
    """
    with handle_errors(json=json):
        if archive == STANDARD_STREAM:
            archive = None
        if archive is None and sys.stdin.isatty():
            raise UsageFault("an archive is not typed; give a file")
        with opened_workspace(workspace) as space:
            if archive is None:
                branch = space.load(name, sys.stdin.buffer, force=force)
            else:
                with archive.open("rb") as file:
                    branch = space.load(name, file, force=force)
        if json:
            print_json("load", branch=name, action="kept")
        else:
            note_result(f"loaded branch {name}", f"review: branching diff {shlex.quote(name)}")
            if not (branch.has_base_record or force):
                note(
                    "the archive does not say what it was made against; "
                    "changes made since are not detected"
                )
