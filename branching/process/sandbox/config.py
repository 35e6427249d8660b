"""The configuration of a sandbox, and how it is derived from a directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from branching._linux.mountinfo import mounts_named
from branching.process.sandbox import mount_table

Isolation = Literal["sandbox", "none"]
"""Whether a process runs in a sandbox. Without one it can reach all that its user can."""

OWN_TMP = Path("/tmp")
"""The directory for temporary files in every sandbox: each has its own."""

PRIVATE_XATTR = "user.branchfs.private"
"""On the root of a mount that has branches: what no process in a branch should reach."""


class Sandbox(NamedTuple):
    """The surroundings of a sandboxed process.

    It sees the directory `view` at the path `at`, may write there, in its own /tmp, /var/tmp and
    /dev/shm, and in its home; all other files are read-only, those of /run are gone, and `private`
    directories are empty. It sees no process but its own, has no capabilities and cannot get any.
    """

    view: Path
    """The directory to work in: a branch."""
    at: Path
    """Where it is seen: the path of the workspace, the same for all branches."""
    mount: Path | None = None
    """The mount that the view is a branch of."""
    private: tuple[Path, ...] = ()
    """Hidden, wherever else they are mounted: the base, the store, control sockets."""
    hide: tuple[str, ...] = ()
    """Globs of paths in the workspace that cannot be read: `**/.env`."""
    network: bool = True
    """False: a new network namespace with only the loopback interface."""
    home: Path | None = None
    """The home directory: writable, if it exists."""
    beside: tuple[tuple[Path, Path], ...] = ()
    """Other directories that are visible, read-only, each with the path where it is seen."""
    caches: tuple[Path, ...] = ()
    """Directories outside of the branch that a command can write, each at its own path. Functions
    do not get them."""
    directory: str | None = None
    """The directory in which a command starts, relative to `at`."""
    keep: tuple[str, ...] = ()
    """Paths that stay visible, read-only, below a directory that is private or replaced."""

    @staticmethod
    def of(
        view: str | os.PathLike[str],
        *,
        at: str | os.PathLike[str] | None = None,
        private: Sequence[str | os.PathLike[str]] = (),
        hide: Sequence[str] = (),
        network: bool = True,
        home: Path | None = None,
        beside: Sequence[tuple[Path, Path]] = (),
        caches: Sequence[Path] = (),
        directory: str | None = None,
    ) -> Sandbox:
        """Returns the sandbox for a directory.

        For the directory of a branch, the mount has the workspace's path and the paths to hide. Any
        other directory is visible at its own path.

        Raises:
            OSError: The directory does not exist.
            TypeError: A glob is not a string.
            ValueError: A glob is invalid.
        """
        validate_isolation("sandbox", network=network, hide=hide)
        place = Path(os.path.realpath(view, strict=True))
        if not place.is_dir():
            raise NotADirectoryError(f"{view} is not a directory")
        mount, told = _mount_of(place)
        return Sandbox(
            view=place,
            at=Path(at) if at is not None else mount or place,
            mount=mount,
            private=(*told, *(Path(os.path.realpath(path)) for path in private)),
            hide=tuple(hide),
            network=network,
            home=home,
            beside=tuple(beside),
            caches=tuple(caches),
            directory=directory,
            keep=_interpreter(),
        )


def validate_isolation(isolation: Isolation, *, network: bool, hide: Sequence[str]) -> None:
    """Raises TypeError and ValueError for invalid globs, and for restrictions without a sandbox."""
    if isolation not in ("sandbox", "none"):
        raise ValueError(f'isolation must be "sandbox" or "none", not {isolation!r}')
    if isolation == "none" and (hide or not network):
        raise ValueError('hide and network need the sandbox: isolation="none" has none')
    if isinstance(hide, str):
        raise TypeError(f"hide must be a sequence of globs, not the string {hide!r}")
    for glob in hide:
        if not glob or glob.startswith("/") or ".." in glob.split("/"):
            raise ValueError(f"{glob!r} is not a glob of paths in the workspace")


def _mount_of(place: Path) -> tuple[Path | None, tuple[Path, ...]]:
    """Returns the root of the workspace's mount around a directory, and the paths that it hides."""
    for directory in (place, *place.parents):
        try:
            told = os.getxattr(directory, PRIVATE_XATTR)
        except OSError:
            continue
        mount = mount_table.rooted_at(str(directory))
        if mount is not None and mount_table.answers(mount):
            return directory, tuple(Path(os.fsdecode(path)) for path in told.split(b"\0") if path)
    around = mounts_named(place)[0]
    if around.fstype == "daxfs" and around.source.startswith("/"):
        # A branch: STORE/ID/NAME, with main's path as its source.
        return Path(around.source), (around.directory.parent.parent,)
    return None, ()


def _interpreter() -> tuple[str, ...]:
    """Returns where this interpreter, its modules and the programs on PATH really lie."""
    named = dict.fromkeys([sys.prefix, sys.base_prefix, *sys.path, *os.get_exec_path()])
    places = [_real(place) for place in named if place.startswith("/")]
    return tuple(dict.fromkeys(place for place in places if place is not None))


def _real(path: str) -> str | None:
    """Returns where a path leads to, None for nowhere. The kernel knows it without a look at each
    directory on the way.
    """
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None  # named, on PATH for instance, but not there
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
