"""`branching log`: what candidates printed, also of branches that are gone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from branching._sanitize import line_for, visible
from branching.cli.error_handling import UsageFault, handle_errors, note
from branching.cli.options import JsonOption, WorkspaceOption
from branching.cli.output import print_json
from branching.cli.pager import NoPagerOption, encoded, patch_lines, show_lines
from branching.cli.table import note_empty, table_lines, time_text
from branching.cli.workspace import opened_workspace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from branching.runlog.run_log import Entry


def log(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="A branch, or the common prefix of the branches of one call.",
            show_default=False,
        ),
    ] = None,
    patch: Annotated[
        bool,
        typer.Option(
            "-p", "--patch", help="Print the changes of the branch as a patch for git apply."
        ),
    ] = False,
    html: Annotated[
        bool,
        typer.Option(
            "--html",
            help="Print a page that compares the candidates of a call: results, resources, changes "
            "side by side, output. [default: of the last call]",
            show_default=False,
        ),
    ] = False,
    taken: Annotated[str | None, typer.Option("--take-report", metavar="NAME", hidden=True)] = None,
    workspace: WorkspaceOption = None,
    no_pager: NoPagerOption = False,
    json: JsonOption = False,
) -> None:
    """List earlier commands and candidates, or print the output of one branch or of one call.

    The workspace keeps their output until branching prune, also of dropped branches: of the
    newest 200, up to 10 MiB each. It also keeps the changes of each candidate as a patch of up to
    256 KiB, and of the winner of a fork up to 64 MiB.

    A terminal gets a pager, and of the control sequences in the output only colours. A pipe gets
    the output unchanged.

    Example: branching log speculate-1a2b3c4d-0

    Example: branching log --html speculate-1a2b3c4d > race.html
    """
    with handle_errors(json=json):
        from branching.runlog.run_log import read_entries

        if patch and name is None:
            raise UsageFault(
                "--patch needs the name of a branch or a call; branching log lists them"
            )

        if html and (patch or json):
            raise UsageFault("--html cannot be combined with --patch or --json")

        with opened_workspace(workspace) as space:  # the store may go with the mount
            logs = None if space.store is None else space.store / "logs"
            entries = [] if logs is None else read_entries(logs)
            if taken is not None:
                _print_kept(logs, taken)
                return
            if html and name is None:
                if not entries:
                    raise UsageFault("no output is kept: nothing has run yet")
                name = entries[-1].call
            if name is None:
                if json:
                    print_json("log", candidates=[entry._asdict() for entry in entries])
                    return
                lines: Iterable[bytes] = encoded(_list(entries))
            else:
                entries = [entry for entry in entries if name in (entry.branch, entry.call)]
                if logs is None or not entries:
                    raise UsageFault(f"no output is kept under {name!r}; branching log lists it")
                if html:
                    _print_page(logs, entries)
                    return
                show = _patches if patch else _outputs
                lines = show(logs, entries, json=json)
        # The workspace is closed while the user reads.
        if not entries:
            note_empty("no output is kept: nothing has run yet")
        show_lines(lines, pager=not no_pager)


def _list(entries: list[Entry]) -> list[str]:
    rows = [
        (
            entry.branch,
            entry.state.replace("_", " "),
            f"{entry.seconds:.1f}s",
            "" if entry.score is None else f"{entry.score:.2f}",
            time_text(entry.started),
            entry.label,
        )
        for entry in entries
    ]
    headers = ("BRANCH", "STATE", "TIME", "SCORE", "STARTED", "COMMAND")
    return table_lines(headers, rows, right=(2, 3))


def _outputs(logs: Path, entries: list[Entry], *, json: bool) -> Iterable[bytes]:
    outputs = {entry.branch: _read(logs / f"{entry.branch}.log") for entry in entries}
    if json:
        candidates = [
            {**entry._asdict(), "output": outputs[entry.branch].decode("utf-8", "replace")}
            for entry in entries
        ]
        print_json("log", candidates=candidates)
        return ()
    return _output_lines(entries, outputs)


def _output_lines(entries: list[Entry], outputs: dict[str, bytes]) -> Iterator[bytes]:
    is_terminal = sys.stdout.isatty()
    for entry in entries:
        prefix = b"" if len(entries) == 1 else f"[{entry.index}] ".encode()
        for line in outputs[entry.branch].split(b"\n")[:-1]:  # each ends in one
            shown = visible(line.decode("utf-8", "replace")).encode() if is_terminal else line
            yield prefix + shown + b"\n"


def _patches(logs: Path, entries: list[Entry], *, json: bool) -> Iterable[bytes]:
    from branching.runlog.patches import read_patch
    from branching.runlog.run_log import UNDER_WAY

    patches = {entry.branch: read_patch(logs, entry.branch) for entry in entries}
    if json:
        candidates = [
            {**entry._asdict(), "patch": text.decode("utf-8", "replace") if text else None}
            for entry in entries
            for text in [patches[entry.branch]]
        ]
        print_json("log", candidates=candidates)
        return ()
    for entry in entries:
        if patches[entry.branch] is None:
            why = "it is still running" if entry.state in UNDER_WAY else "no change, or still open"
            note(line_for(sys.stderr, f"{entry.branch}: no patch is kept: {why}"))
    kept = (patches[entry.branch] or b"" for entry in entries)
    return (line for text in kept for line in patch_lines(text.splitlines(keepends=True)))


def _print_page(logs: Path, entries: list[Entry]) -> None:
    from branching.cli.html_report import report_of

    sys.stdout.buffer.write(report_of(logs, [entry.branch for entry in entries]) or b"")
    sys.stdout.buffer.flush()


def _print_kept(logs: Path | None, token: str) -> None:
    """Prints a report that a race in this container has kept for the wrapper, and removes it."""
    from branching.cli.report_file import take_report

    page = None if logs is None or not token.isalnum() else take_report(logs, token)
    if page is None:
        raise UsageFault("no report is kept under this name")
    sys.stdout.buffer.write(page)
    sys.stdout.buffer.flush()


def _read(path: Path) -> bytes:
    from branching.fs.store_files import read

    try:
        return read(path)
    except FileNotFoundError:
        return b""  # it went to make room, after it was listed
