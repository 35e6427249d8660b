"""A project on the host, and the whole of its tree as a value, so that "nothing changed" is one comparison."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Project:
    """A directory to work on."""

    root: Path
    owner: int

    def tree(self) -> dict[str, tuple[object, ...]]:
        """Returns every entry with kind, mode, owner, group, modification time, links and content."""
        return {
            str(path.relative_to(self.root)): entry(path)
            for path in sorted((self.root, *self.root.rglob("*")), key=os.fspath)
        }


def entry(path: Path) -> tuple[object, ...]:
    """Returns what must not change about one entry."""
    status = path.lstat()
    if path.is_symlink():
        content: object = path.readlink()
    elif path.is_file():
        content = hashlib.sha256(path.read_bytes()).hexdigest()
    else:
        content = None
    links = None if stat.S_ISDIR(status.st_mode) else status.st_nlink
    return (oct(status.st_mode), status.st_uid, status.st_gid, status.st_mtime_ns, links, content)
