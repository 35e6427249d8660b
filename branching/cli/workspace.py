"""Where a command works: the workspace it was told, or found, or made, and as whom.

A directory that is no mount is mounted for the length of the command, if that can be done here:
the program `branchfs` and /dev/fuse are what it takes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from branching._caller import START_VARIABLE, host_directory
from branching.cli.error_handling import note
from branching.cli.signals import defer_signals
from branching.errors import MountError

if TYPE_CHECKING:
    from branching.fs import Workspace
    from branching.process import Owner

FUSE = Path("/dev/fuse")


mount_options: dict[str, Any] = {}
"""How a directory is mounted for the length of a command: the arguments `driver` and `policy` of
`Workspace.open`. Set by the options in front of the command."""


@contextmanager
def opened_workspace(
    path: Path | None, *, while_mounting: Callable[[], None] | None = None
) -> Iterator[Workspace]:
    """Opens the workspace around `path`, or around the current directory, and closes it.

    Args:
        path: A path in the workspace.
        while_mounting: Called while `branchfs mount` works, if the directory is not mounted.
    """
    with defer_signals(), _open(path, while_mounting) as workspace:
        if workspace.dropped:
            names = ", ".join(workspace.dropped)
            note(f"dropped the branches of a program that was killed: {names}")
        yield workspace


@contextmanager
def owned_workspace(
    path: Path | None, *, while_mounting: Callable[[], None] | None = None
) -> Iterator[tuple[Workspace, Owner | None]]:
    """Does the same for a command that runs others: it lends the workspace's owner a home for its
    length, and may have as many files open as hundreds of them take."""
    from branching._linux.rlimits import raise_open_files
    from branching.process.run_as import Owner

    raise_open_files()
    with (
        opened_workspace(path, while_mounting=while_mounting) as workspace,
        Owner.of(*workspace.owner) as owner,
    ):
        yield workspace, owner


def start_directory(workspace: Workspace) -> str | None:
    """Returns where in the workspace the caller is, relative to its root; None outside of it.

    In a container that is where the caller is on the host.
    """
    if host_directory() is not None:
        return os.environ.get(START_VARIABLE) or None
    try:
        place = Path.cwd()
    except FileNotFoundError:
        return None
    for top in (workspace.path, workspace.base, workspace.seen_at):
        if place != top and place.is_relative_to(top):
            return str(place.relative_to(top))
    return None


def _open(path: Path | None, while_mounting: Callable[[], None] | None) -> Workspace:
    from branching.fs.workspace import NoMount, mount_directory, open_mounted

    place = path or Path.cwd()
    # First of all, for a mount whose daemon has died is no directory any more, and says why itself.
    try:
        return open_mounted(place, **mount_options)
    except NoMount:
        pass
    from branching._programs import find_branchfs
    from branching.fs.automount import base_around
    from branching.fs.branchfs import sealed

    if not place.is_dir():
        raise MountError(f"workspace path does not exist: {path}", path=str(path))
    around = os.environ.get("BRANCHING_WORKSPACE")
    if around and place.resolve().is_relative_to(around):
        raise sealed(Path(around))  # the mount is the kernel's overlay, and tells nothing
    try:
        find_branchfs()
    except MountError as error:
        raise _no_workspace(path, place, error.hint) from error
    if not FUSE.exists():
        raise _no_workspace(path, place, "modprobe fuse, or run with --device /dev/fuse")
    if path is not None:
        return mount_directory(place, while_mounting=while_mounting, **mount_options)
    base = base_around(place)
    if base != place.resolve():
        note(f"workspace: {base} (above the current directory)")
    return mount_directory(base, while_mounting=while_mounting, **mount_options)


def _no_workspace(path: Path | None, place: Path, hint: str | None) -> MountError:
    text = "no branchfs mount found for current directory; use -w/--workspace"
    if path is not None:
        text = f"{path} is not inside a branchfs mount, and cannot be mounted here"
    return MountError(text, path=str(place), hint=hint)
