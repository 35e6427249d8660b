"""The files of the workspace that a sandbox hides: which they are, and whether they stay hidden.

A cover is a mount on top of a name. Nobody inside can take it away, but the kernel itself does
when the file system below gives the name up: for a name that was removed from outside, or that a
FUSE daemon calls outdated. So init watches the covers, and the sandbox ends when one has gone.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Sequence

from branching.process.sandbox import mounts

_VANISHED = "it is listed, and gone when it is to be hidden: somebody changes it meanwhile"
_LEADS_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def find(top: str, globs: Sequence[str]) -> list[str]:
    """Returns the places below `top` to be covered: what the globs match, what matching links lead
    to, and the other names of the same files. Cost: every directory is listed; where one of them
    has other names, every file is looked at too.

    OSError when a directory cannot be listed, or a name is gone again: what cannot be looked at
    cannot be hidden either.
    """
    wanted = [glob_pattern(glob) for glob in globs]
    found = []
    for directory, names, files in os.walk(top, onerror=_give_up):
        for name in (*names, *files):
            path = f"{directory}/{name}"
            within = os.path.relpath(path, top)
            if any(pattern.fullmatch(within) for pattern in wanted):
                found.append(path)
                if name in names:
                    names.remove(name)
    places = dict.fromkeys(place for path in found for place in _place_of(path))
    return [*places, *_other_names(top, places)]


class Watch:
    """Looks after the covers, which are mounts of this process's table."""

    def __init__(self, before: set[int]) -> None:
        """The covers are all that is mounted now and was not `before`."""
        self._table = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        self._covers = mounts.ids(self._table) - before

    def fileno(self) -> int:
        """A descriptor that polls POLLPRI when the mount table has changed."""
        return self._table

    def is_whole(self) -> bool:
        """Whether all covers are there."""
        return self._covers <= mounts.ids(self._table)


def _other_names(top: str, places: Collection[str]) -> list[str]:
    """Finds the hard links to the places, and to what is in them."""
    known = set()
    for place in places:
        if not os.path.isdir(place):
            known.add(_identity(place))
        elif place.startswith(f"{top}/"):
            # Where we may not look, nobody in the sandbox may either.
            known.update(map(_identity, _files_in(place, None)))
    known.discard(None)
    if not known:
        return []
    covered = tuple(f"{place}/" for place in places)
    return [
        path
        for path in _files_in(top, _give_up)
        if path not in places and not path.startswith(covered) and _identity(path) in known
    ]


def _files_in(directory: str, on_error: Callable[[OSError], None] | None) -> Iterator[str]:
    for within, _, files in os.walk(directory, onerror=on_error):
        yield from (f"{within}/{name}" for name in files)


def _identity(path: str) -> tuple[int, int] | None:
    """Returns what tells a file that has several names; None for one that has not."""
    try:
        found = os.lstat(path)
    except FileNotFoundError as error:
        raise OSError(errno.ESTALE, _VANISHED, path) from error
    is_alone = found.st_nlink < 2 or not stat.S_ISREG(found.st_mode)
    return None if is_alone else (found.st_dev, found.st_ino)


def _give_up(error: OSError) -> None:
    raise error


def _place_of(path: str) -> list[str]:
    """Returns what is to be covered: a link is as readable as what it leads to."""
    place = os.path.realpath(path)
    try:
        os.stat(place)
    except OSError as error:
        if error.errno in _LEADS_NOWHERE and os.path.islink(path):
            return []
        if error.errno == errno.ENOENT:
            raise OSError(errno.ESTALE, _VANISHED, path) from error
        raise
    return [place]


def glob_pattern(glob: str) -> re.Pattern[str]:
    """Reads a glob: `*` stays within a name, `**/` stands for any directories, or none."""
    text = ""
    for part in re.split(r"(\*\*/|\*\*|\*|\?)", glob):
        known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
        text += known.get(part, re.escape(part))
    return re.compile(text, re.DOTALL)
