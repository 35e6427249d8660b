"""`--cache`: directories outside of the branch that commands can write, such as `~/.cargo`.

A cache is not branched: all branches share it, and what a command writes there stays, whatever
becomes of the branch. So it must be a directory whose content nobody trusts more than a download:
`checked_caches` refuses places in which a write would take effect elsewhere.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from branching.cli.error_handling import UsageFault
from branching.cli.options import not_blank

if TYPE_CHECKING:
    from branching.fs import Workspace

CacheOption = Annotated[
    list[str] | None,
    typer.Option(
        "--cache",
        metavar="DIR",
        callback=not_blank,
        help="A directory outside of the workspace that commands can write, such as "
        "~/.cargo/registry. It is shared by all branches and not undone: see docs/security.md. "
        "Repeatable.",
        show_default=False,
    ),
]

_SYSTEM = "/bin /boot /dev /etc /lib /lib32 /lib64 /proc /run /sbin /sys /usr"
_SYSTEM_PLACES = tuple(map(Path, _SYSTEM.split()))
_SHARED_TMP = (Path("/tmp"), Path("/var/tmp"))
KEYS_OF_HOME = (".ssh", ".gnupg", ".aws", ".kube", ".docker", ".config", ".local/bin")
"""Directories of a home with keys, or with files that the user's own programs obey."""
_SOCKETS = Path("/proc/net/unix")
_PARTS_MIN = 3
"""Of a path: "/" and two names. Directories above belong to the whole machine."""


def checked_caches(names: Sequence[str], workspace: Workspace) -> tuple[Path, ...]:
    """Returns the real paths of caches.

    Args:
        names: The directories as given.
        workspace: The open workspace.

    Raises:
        UsageFault: A directory does not exist, or must not be writable from a branch.
    """
    caches = []
    for name in names:
        cache = Path(os.path.realpath(Path(name).expanduser()))
        if not cache.is_dir():
            raise UsageFault(f"--cache {name}: there is no such directory; mkdir -p creates it")
        if why := _why_not(cache, workspace):
            raise UsageFault(f"--cache {name}: {why}; name a directory that contains only a cache")
        caches.append(cache)
    return tuple(caches)


def _why_not(cache: Path, workspace: Workspace) -> str | None:
    """Returns why a directory must not be writable from a branch, None if it may."""
    own = [workspace.base, workspace.path, workspace.seen_at, workspace.store]
    for place in filter(None, own):
        if cache.is_relative_to(place):
            return "it is in the workspace, whose files are branched"
        if place.is_relative_to(cache):
            return "the workspace is in it"
    for home in _homes(workspace):
        if home.is_relative_to(cache):
            return "it is the home directory, or contains it"
        if any(cache.is_relative_to(home / name) for name in KEYS_OF_HOME):
            return "it contains keys or settings of the user"
    if cache in _SHARED_TMP or len(cache.parts) < _PARTS_MIN:
        return "it is shared by the whole machine"
    if any(cache.is_relative_to(place) for place in _SYSTEM_PLACES):
        return "it belongs to the operating system"
    if socket := _socket_in(cache):
        return f"a program listens at the socket {socket}"
    return None


def _homes(workspace: Workspace) -> list[Path]:
    """Returns the homes of the caller and of the workspace's owner."""
    homes = [str(Path.home())]
    with suppress(KeyError):  # a uid without an entry
        homes.append(pwd.getpwuid(workspace.owner[0]).pw_dir)
    return [Path(os.path.realpath(home)) for home in homes if home != "/"]


def _socket_in(cache: Path) -> str | None:
    """Returns a socket below a directory at which a program listens, None if there is none."""
    with _SOCKETS.open(encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            path = line.rstrip("\n").partition(" /")[2]
            if path and Path(f"/{path}").is_relative_to(cache):
                return f"/{path}"
    return None
