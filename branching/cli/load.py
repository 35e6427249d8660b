"""`branching load`: a branch from a file."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from branching.cli.activity import shown_activity
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
            "--force", help="Load the archive even if its paths have changed since it was written."
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Create a branch from an archive that branching export wrote, or from any OCI layer.

    A damaged archive, or one that leads outside of the workspace, is refused and changes nothing.
    So is an archive that was made against other content: the paths that have changed since are
    listed. Afterwards use branching diff, commit or abort.

    Example: branching load fix fix.tar
    """
    with handle_errors(json=json):
        if archive == STANDARD_STREAM:
            archive = None
        if archive is None and sys.stdin.isatty():
            raise UsageFault("refusing to read an archive from the terminal; give a file")
        with opened_workspace(workspace) as space, shown_activity("loading"):
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
                    "the archive does not record the state it was made from; later changes are "
                    "not detected"
                )
