"""`branching export`: a branch as a file, to be carried elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from branching.cli.error_handling import UsageFault, handle_errors
from branching.cli.options import STANDARD_STREAM, BranchArgument, WorkspaceOption
from branching.cli.workspace import opened_workspace


def export(
    name: BranchArgument,
    workspace: WorkspaceOption = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="A new file, or - for standard output. [default: standard output]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write all that a branch changed as an OCI layer: a tar archive with marks for what is gone.

    The branch stays. branching load makes a branch of the archive, in any workspace.

    Example: branching export run-1a2b3c4d -o fix.tar
    """
    with handle_errors(json=False):
        if output == STANDARD_STREAM:
            output = None
        if output is None and sys.stdout.isatty():
            raise UsageFault("an archive is nothing for a terminal; give a file with -o FILE")
        with opened_workspace(workspace) as space:
            branch = space.reopen(name)
            if output is None:
                branch.export(sys.stdout.buffer)
                return
            with output.open("xb") as file:
                try:
                    branch.export(file)
                except BaseException:
                    output.unlink()  # half an archive is of no use
                    raise
