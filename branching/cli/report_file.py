"""The file of `--report`: checked before anything runs, written when the call has ended."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

import typer

from branching._caller import host_directory
from branching.cli.error_handling import UsageFault, note

if TYPE_CHECKING:
    from branching.fs import Workspace

TOKEN_VARIABLE = "BRANCHING_REPORT"
"""In a container: the name under which the page is kept until the wrapper asks for it."""

ReportOption = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FILE",
        help="Write an HTML page here that compares the candidates: states, times, scores, "
        "resources, changes side by side, output. Replaces a file of that name.",
        show_default=False,
    ),
]


class ReportFile:
    """The report of one call, to be used in a `with` that encloses that of the workspace.

    The page is made while the workspace is open, and written at the end of the `with`, also when
    the call fails: then it shows what was tried. A file in the workspace is therefore never seen
    by a candidate, and is not in the way of the commit.

    Args:
        path: The file; None for no report.

    Raises:
        UsageFault: The page could not be written there.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._page: bytes | None = None
        self._lacks = "nothing ran"
        if path is None:
            return
        if host_directory() is not None:
            if not _token():
                raise UsageFault(
                    "--report writes a file, which would be lost in the container; afterwards, "
                    "branching log --html prints the same page"
                )
            return  # the wrapper has checked the file, and asks for the page
        if path.exists() and not path.is_file():
            raise UsageFault(f"--report {path}: it exists, and is not a file")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise UsageFault(f"--report {path}: no file can be written in {path.parent}")

    def check(self, workspace: Workspace) -> None:
        """Raises UsageFault if the workspace has no log of which the report could be made."""
        if self._path is not None and workspace.store is None:
            raise UsageFault(
                "--report needs the log of the workspace, which is not visible inside a branch"
            )

    def collect(self, workspace: Workspace, branches: Sequence[str]) -> None:
        """Makes the page from the log.

        Args:
            workspace: The open workspace.
            branches: The branches of the call's candidates.
        """
        if self._path is None or workspace.store is None:
            return
        from branching.cli.html_report import report_of

        logs = workspace.store / "logs"
        try:
            self._page = report_of(logs, branches)
            if self._page is not None and host_directory() is not None:
                keep_report(logs, _token(), self._page)
        except OSError as error:
            self._lacks = f"the log cannot be read or written: {error}"

    def __enter__(self) -> ReportFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._path is None:
            return
        if self._page is None:
            lacks = self._lacks
        else:
            lacks = "" if host_directory() else self._write(self._path, self._page)
        if lacks:  # what the call did stands; its exit code speaks of that
            note(f"the report {self._path} was not written: {lacks}")

    @staticmethod
    def _write(path: Path, page: bytes) -> str:
        """Writes the page. Returns why that failed, or ""."""
        scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            scratch.write_bytes(page)
            scratch.replace(path)
        except OSError as error:
            scratch.unlink(missing_ok=True)
            return error.strerror or str(error)
        return ""


def keep_report(logs: Path, token: str, page: bytes) -> None:
    """Keeps a page beside the logs, for `take_report`. OSError if it cannot be written."""
    from branching.fs.store_files import open_directory, open_file

    directory = open_directory(logs)
    try:
        file = open_file(
            _kept_name(token), os.O_WRONLY | os.O_CREAT | os.O_EXCL, directory=directory
        )
        with os.fdopen(file, "wb") as stream:
            if os.geteuid() == 0:
                owner = os.fstat(directory)
                os.fchown(file, owner.st_uid, owner.st_gid)
            stream.write(page)
    finally:
        os.close(directory)


def take_report(logs: Path, token: str) -> bytes | None:
    """Returns the page that was kept under a token, and removes it; None if there is none."""
    from branching.fs.store_files import read

    path = logs / _kept_name(token)
    try:
        page = read(path)
    except FileNotFoundError:
        return None
    path.unlink()
    return page


def _kept_name(token: str) -> str:
    return f"report-{token}.html"


def _token() -> str:
    token = os.environ.get(TOKEN_VARIABLE, "")
    return token if token.isalnum() else ""
