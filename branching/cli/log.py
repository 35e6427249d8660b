"""`branching log`: what candidates printed, also of branches that are gone."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from branching._sanitize import line_for, visible
from branching.cli.error_handling import UsageFault, handle_errors
from branching.cli.options import JsonOption, WorkspaceOption
from branching.cli.output import print_json
from branching.cli.workspace import opened_workspace

if TYPE_CHECKING:
    from branching.runlog.run_log import Entry


def log(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="A branch, or the name that all branches of one call begin with.",
            show_default=False,
        ),
    ] = None,
    patch: Annotated[
        bool,
        typer.Option(
            "-p", "--patch", help="Print what the branch changed, as a patch that git apply takes."
        ),
    ] = False,
    html: Annotated[
        bool,
        typer.Option(
            "--html",
            help="Print a page that compares the candidates of a call: results, changes side by "
            "side, output. [default: of the last call]",
            show_default=False,
        ),
    ] = False,
    workspace: WorkspaceOption = None,
    json: JsonOption = False,
) -> None:
    """List what ran and what became of it, or print the output of one branch, or of one call.

    The output of candidates, and of what was run, is kept with the workspace, also of branches
    that were dropped: the newest 200 and 10 MiB of each, until branching prune. So is what each
    candidate changed, as a patch of at most 256 KiB, of the winner of a fork 64 MiB.

    On a terminal only colours are let through of what would command it; a pipe gets all as it was.

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
            raise UsageFault("--html goes with neither --patch nor --json")

        with opened_workspace(workspace) as space:  # the store may go with the mount
            logs = None if space.store is None else space.store / "logs"
            entries = [] if logs is None else read_entries(logs)
            if html and name is None:
                if not entries:
                    raise UsageFault("no output is kept: nothing has run yet")
                name = entries[-1].call
            if name is not None:
                entries = [entry for entry in entries if name in (entry.branch, entry.call)]
                if logs is None or not entries:
                    raise UsageFault(f"no output is kept under {name!r}; branching log lists it")
                if html:
                    _print_page(logs, entries)
                elif patch:
                    _print_patches(logs, entries, json=json)
                else:
                    _print_output(logs, entries, json=json)
            elif json:
                print_json("log", candidates=[asdict(entry) for entry in entries])
            else:
                _print_list(entries)


def _print_list(entries: list[Entry]) -> None:
    width = max((len(entry.branch) for entry in entries), default=0)
    for entry in entries:
        score = "" if entry.score is None else f"{entry.score:.2f}"
        state = entry.state.replace("_", " ")
        label = entry.label.replace("\n", " ")
        facts = f"{state:<9}  {entry.seconds:>7.1f}s  {score:>6}"
        print(line_for(sys.stdout, f"{entry.branch:<{width}}  {facts}  {label}"))


def _print_output(logs: Path, entries: list[Entry], *, json: bool) -> None:
    outputs = {entry.branch: _read(logs / f"{entry.branch}.log") for entry in entries}
    if json:
        candidates = [
            {**asdict(entry), "output": outputs[entry.branch].decode("utf-8", "replace")}
            for entry in entries
        ]
        print_json("log", candidates=candidates)
        return
    is_terminal = sys.stdout.isatty()
    for entry in entries:
        prefix = b"" if len(entries) == 1 else f"[{entry.index}] ".encode()
        for line in outputs[entry.branch].split(b"\n")[:-1]:  # each ends in one
            shown = visible(line.decode("utf-8", "replace")).encode() if is_terminal else line
            sys.stdout.buffer.write(prefix + shown + b"\n")
    sys.stdout.buffer.flush()


def _print_patches(logs: Path, entries: list[Entry], *, json: bool) -> None:
    from branching.runlog.patches import read_patch
    from branching.runlog.run_log import UNDER_WAY

    patches = {entry.branch: read_patch(logs, entry.branch) for entry in entries}
    if json:
        candidates = [
            {**asdict(entry), "patch": text.decode("utf-8", "replace") if text else None}
            for entry in entries
            for text in [patches[entry.branch]]
        ]
        print_json("log", candidates=candidates)
        return
    is_terminal = sys.stdout.isatty()
    for entry in entries:
        text = patches[entry.branch]
        if text is None:
            why = "it runs still" if entry.state in UNDER_WAY else "it changed nothing, or is open"
            note = f"{entry.branch}: no patch is kept: {why}"
            print(line_for(sys.stderr, note), file=sys.stderr)
            continue
        for line in text.splitlines(keepends=True):
            shown = visible(line.decode("utf-8", "replace")).encode() if is_terminal else line
            sys.stdout.buffer.write(shown)
    sys.stdout.buffer.flush()


def _print_page(logs: Path, entries: list[Entry]) -> None:
    from branching.cli.html_report import html_report

    outputs = {entry.branch: _read(logs / f"{entry.branch}.log") for entry in entries}
    page = html_report(logs, entries, outputs)
    sys.stdout.buffer.write(page.encode("utf-8", "replace") + b"\n")
    sys.stdout.buffer.flush()


def _read(path: Path) -> bytes:
    from branching.fs.store_files import read

    try:
        return read(path)
    except FileNotFoundError:
        return b""  # it went to make room, after it was listed
