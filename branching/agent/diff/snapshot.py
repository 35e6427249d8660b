"""Paths of one tree; each is read once and then cached.

A file of at most `TEXT_BYTES_MAX` is read as a whole, and its identity is computed from that. For a
bigger one only the digest is computed. A path that is removed meanwhile is reported as far as it
was read.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from functools import cached_property

from branching.agent.branch_files import read_whole
from branching.agent.diff.text import TEXT_BYTES_MAX
from branching.agent.fingerprint import identity, identity_of_file
from branching.fs.confined_dir import ConfinedDir


class TreeSnapshot:
    """One tree as it is seen during one comparison."""

    def __init__(self, tree: ConfinedDir) -> None:
        self.tree = tree
        self._seen: dict[str, PathSnapshot] = {}

    def at(self, path: str) -> PathSnapshot:
        """Returns the object at a path."""
        if path not in self._seen:
            self._seen[path] = PathSnapshot(self.tree, path)
        return self._seen[path]


@dataclass
class PathSnapshot:
    """One path."""

    tree: ConfinedDir
    path: str

    def __post_init__(self) -> None:
        found = self.tree.lstat(self.path)
        self._mode = 0 if found is None else found.st_mode
        self.size = 0 if found is None else found.st_size

    @property
    def is_there(self) -> bool:
        return self._mode != 0

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self._mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self._mode)

    @cached_property
    def data(self) -> bytes | None:
        """A file's content or a link's target; None for other types, missing or big files."""
        try:
            if stat.S_ISLNK(self._mode):
                return self.tree.readlink(self.path).encode(errors="surrogateescape")
            if self.is_file and self.size <= TEXT_BYTES_MAX:
                return read_whole(self.tree, self.path, most=TEXT_BYTES_MAX)
        except OSError:
            pass  # removed, grown or unreadable: only its identity is known
        return None

    @cached_property
    def identity(self) -> str:
        """See `branching.agent.fingerprint`."""
        if not self.is_there:
            return ""
        if self.is_file and self.data is not None:
            return identity_of_file(self._mode, self.data)
        try:
            return identity(self.tree, self.path)
        except OSError as error:
            return f"unreadable {error.strerror}"

    @property
    def content_digest(self) -> str | None:
        """The digest of a file that is not empty."""
        return self.identity.rpartition(" ")[2] if self.is_file and self.size else None
