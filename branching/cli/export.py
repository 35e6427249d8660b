"""`branching export`: a branch as a file, to be carried elsewhere."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from branching.cli.activity import shown_activity
from branching.cli.error_handling import UsageFault, handle_errors
from branching.cli.options import STANDARD_STREAM, JsonOption, WorkspaceOption, not_blank
from branching.cli.output import note_result, print_json, size_phrase
from branching.cli.workspace import opened_workspace

if TYPE_CHECKING:
    from branching.fs import Branch, Workspace


def export(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[BRANCH]",
            help="Name of an open branch. [default with --whole: main]",
            show_default=False,
        ),
    ] = None,
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
    whole: Annotated[
        bool,
        typer.Option(
            "--whole",
            help="Write all files of the branch, not only its changes: a base for branching "
            "attempt on other machines.",
        ),
    ] = False,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            callback=not_blank,
            help="Leave these paths out, with everything below them. Repeatable.",
            show_default=False,
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write the changes of a branch as an OCI layer: a tar archive with whiteouts for deletions.

    The branch stays open. branching load creates a branch from the archive, in any workspace.
    --json needs a FILE for the archive: without one, standard output has the archive, and only a
    failure is reported as JSON.

    Example: branching export run-1a2b3c4d -o fix.tar
    """
    with handle_errors(json=json):
        if output == STANDARD_STREAM:
            output = None
        if output is None and sys.stdout.isatty():
            raise UsageFault("refusing to write an archive to the terminal; use -o FILE or a pipe")
        if name is None and not whole:
            raise UsageFault("name a branch, or use --whole to write all of main")
        with opened_workspace(workspace) as space, _branch(space, name) as branch:
            if output is None:
                with shown_activity("exporting"):
                    branch.export(sys.stdout.buffer, whole=whole, exclude=exclude or ())
                return
            with output.open("xb") as file, shown_activity("exporting"):
                try:
                    branch.export(file, whole=whole, exclude=exclude or ())
                except BaseException:
                    output.unlink()  # half an archive is of no use
                    raise
        if json:
            print_json(
                "export", branch=name or "main", output=str(output), bytes=output.stat().st_size
            )
        else:
            note_result(f"wrote {output} ({size_phrase(output.stat().st_size)})")


@contextmanager
def _branch(space: Workspace, name: str | None) -> Iterator[Branch]:
    """Yields the branch, or one of main that lasts for the length of the `with`."""
    if name is not None:
        yield space.reopen(name)
        return
    branch = space.branch(f"export-{secrets.token_hex(4)}")
    with branch:
        try:
            yield branch
        finally:
            branch.abort()
