"""Where a command works: the workspace it was told, or found, and whom its commands run as."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from branching.errors import MountError

if TYPE_CHECKING:
    from branching.fs import Workspace
    from branching.process import Owner


def open_workspace(path: Path | None) -> Workspace:
    """Opens the workspace around `path`, or around the current directory."""
    from branching.fs import Workspace
    from branching.fs.workspace import find_mount

    if path is not None:
        if not path.is_dir():
            raise MountError(f"workspace path does not exist: {path}", path=str(path))
        return Workspace(path)
    here = Path.cwd()
    if find_mount(here) is None:
        raise MountError(
            "no branchfs mount found for current directory; use -w/--workspace", path=str(here)
        )
    return Workspace(here)


@contextmanager
def owned_workspace(path: Path | None) -> Iterator[tuple[Workspace, Owner | None]]:
    """Opens the workspace, and lends its owner a home for the length of the command."""
    from branching.process import Owner

    workspace = open_workspace(path)
    try:
        with Owner.of(*workspace.owner) as owner:
            yield workspace, owner
    finally:
        workspace.close()
