"""The files of the workspace that a sandbox hides: which they are, and whether they stay hidden.

A cover is a mount on top of a name. Nobody inside can take it away, but the kernel itself does
when the file system below gives the name up: for a name that was removed from outside, or that a
FUSE daemon calls outdated. So init watches the covers, and the sandbox ends when one has gone.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence

from branching.process.sandbox import mounts

_LEADS_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def find(top: str, globs: Sequence[str]) -> list[str]:
    """Returns the places below `top` to be covered. Cost: every directory is listed.

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
    return list(dict.fromkeys(place for path in found for place in _place_of(path)))


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
            text = "it is listed, and gone when it is to be hidden: somebody changes it meanwhile"
            raise OSError(errno.ESTALE, text, path) from error
        raise
    return [place]


def glob_pattern(glob: str) -> re.Pattern[str]:
    """Reads a glob: `*` stays within a name, `**/` stands for any directories, or none."""
    text = ""
    for part in re.split(r"(\*\*/|\*\*|\*|\?)", glob):
        known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
        text += known.get(part, re.escape(part))
    return re.compile(text, re.DOTALL)
