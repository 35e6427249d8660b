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
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from branching._linux import mountinfo

_VANISHED = "it disappeared before it could be hidden: another process is changing it"
_TICK_NANOSECONDS = 20_000_000
"""Times of files count in ticks of the kernel's clock, of 10 ms at most."""
_Stamp = tuple[int, int, int]
_LEADS_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def find(top: str, globs: Sequence[str]) -> list[str]:
    """Returns the places below `top` to be covered: what the globs match, what matching links lead
    to, and the other names of the same files. Cost: every directory is listed; where one of them
    has other names, every file is looked at too.

    OSError when a directory cannot be listed, or a name is gone again: what cannot be looked at
    cannot be hidden either.
    """
    places = Finder(top, globs).places()
    return [*places, *_other_names(top, places)]


class Finder:
    """Finds hidden places in a tree again and again; safe from any thread.

    A directory is listed again only if it has changed. So a question costs one look at each
    directory, not one at each file.
    """

    def __init__(self, top: str, globs: Sequence[str]) -> None:
        self._top = top
        self._wanted = [glob_pattern(glob) for glob in globs]
        self._lock = threading.Lock()
        self._listings: dict[str, _Listing] = {}

    def places(self) -> dict[str, None]:
        """Returns what the globs match, and what matching links lead to. OSError as `find`."""
        with self._lock:
            known, self._listings = self._listings, {}
            found = []
            todo = [""]
            while todo:
                within = todo.pop()
                listing = self._listed(within, known.get(within))
                self._listings[within] = listing
                found += listing.matches
                todo += listing.directories
        return dict.fromkeys(place for path in found for place in _place_of(path))

    def hides(self, within: str) -> bool:
        """Tells whether `find` would return the path, or a directory that it lies in."""
        parts = within.split("/")
        names = ["/".join(parts[: length + 1]) for length in range(len(parts))]
        if any(pattern.fullmatch(name) for pattern in self._wanted for name in names):
            return True
        places = self.places()
        if any(f"{self._top}/{name}" in places for name in names):
            return True
        try:
            itself = _identity(f"{self._top}/{within}")
        except OSError:
            return False  # there is no such file
        return itself is not None and itself in _identities(self._top, places)

    def _listed(self, within: str, known: _Listing | None) -> _Listing:
        path = f"{self._top}/{within}" if within else self._top
        now = time.time_ns()
        found = os.lstat(path)
        stamp: _Stamp | None = (found.st_dev, found.st_ino, found.st_ctime_ns)
        if known is not None and known.stamp == stamp:
            return known
        if now - found.st_ctime_ns < _TICK_NANOSECONDS:
            stamp = None  # a later change could have the same time
        matches, directories = [], []
        with os.scandir(path) as entries:
            for entry in entries:
                name = f"{within}/{entry.name}" if within else entry.name
                if any(pattern.fullmatch(name) for pattern in self._wanted):
                    matches.append(f"{self._top}/{name}")
                elif entry.is_dir(follow_symlinks=False):
                    directories.append(name)
        return _Listing(stamp, matches, directories)


class _Listing(NamedTuple):
    """What is in a directory: names that match, and directories to look into."""

    stamp: _Stamp | None
    matches: list[str]
    directories: list[str]


class Watch:
    """Looks after the covers, which are mounts of this process's table at the moment."""

    def __init__(self, is_cover: Callable[[mountinfo.Mount], bool]) -> None:
        self._table = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        self._covers = mountinfo.ids(self._table, is_cover)

    def fileno(self) -> int:
        """A descriptor that polls POLLPRI when the mount table has changed."""
        return self._table

    def is_whole(self) -> bool:
        """Returns whether all covers exist."""
        return self._covers <= mountinfo.ids(self._table)

    def close(self) -> None:
        """Ends the watch, which keeps the mounts of the table in use."""
        os.close(self._table)


def _other_names(top: str, places: Collection[str]) -> list[str]:
    """Returns all hard links to the masked files, including files inside masked directories."""
    known = _identities(top, places)
    if not known:
        return []
    covered = tuple(f"{place}/" for place in places)
    return [
        path
        for path in _files_in(top, _give_up)
        if path not in places and not path.startswith(covered) and _identity(path) in known
    ]


def _identities(top: str, places: Collection[str]) -> set[tuple[int, int] | None]:
    """Returns the identities (device, inode) of files with several links at or below the paths."""
    known = set()
    for place in places:
        if not os.path.isdir(place):
            known.add(_identity(place))
        elif place.startswith(f"{top}/"):
            # Directories that we cannot read cannot be read in the sandbox either.
            known.update(map(_identity, _files_in(place, None)))
    known.discard(None)
    return known


def _files_in(directory: str, on_error: Callable[[OSError], None] | None) -> Iterator[str]:
    for within, _, files in os.walk(directory, onerror=on_error):
        yield from (f"{within}/{name}" for name in files)


def _identity(path: str) -> tuple[int, int] | None:
    """Returns the identity (device, inode) of a file with several hard links, else None."""
    try:
        found = os.lstat(path)
    except FileNotFoundError as error:
        raise OSError(errno.ESTALE, _VANISHED, path) from error
    is_alone = found.st_nlink < 2 or not stat.S_ISREG(found.st_mode)
    return None if is_alone else (found.st_dev, found.st_ino)


def _give_up(error: OSError) -> None:
    raise error


def _place_of(path: str) -> list[str]:
    """Returns the path to cover: the target of a symbolic link. Empty if it leads nowhere."""
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
