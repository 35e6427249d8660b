"""A project on the host, and the whole of its tree as a value, so that "nothing changed" is one comparison."""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

STORE = ".branching"


@dataclass(frozen=True)
class Project:
    """A directory to work on."""

    root: Path
    owner: int

    def tree(self) -> dict[str, tuple[object, ...]]:
        """Returns every entry with kind, mode, owner, group, modification time, links and content.

        Without the store: after a commit it stays, with what an undo needs.
        """
        paths = sorted([self.root, *walk(self.root, skipped=self.root / STORE)])
        return {str(path.relative_to(self.root)): entry(path) for path in paths}

    def roots(self) -> list[str]:
        """Returns what the owner cannot remove, or what another, root say, has put beside the store.

        In the store the kernel's overlay has empty directories of root's, and BranchFS its records; who owns what they
        lie in can remove them.
        """
        left = []
        for path in walk(self.root):
            with suppress(FileNotFoundError):  # a daemon may still remove what a branch left
                if path.lstat().st_uid != self.owner:
                    is_full = path.is_dir() and not path.is_symlink() and any(path.iterdir())
                    is_theirs = path.parent.lstat().st_uid == self.owner
                    if is_full or not is_theirs or STORE not in path.relative_to(self.root).parts:
                        left.append(str(path))
        return left


def walk(top: Path, *, skipped: Path | None = None) -> Iterator[Path]:
    """Yields everything below a directory. A directory that is removed meanwhile is skipped."""
    for at, directories, files in os.walk(top):
        directories[:] = [name for name in directories if Path(at, name) != skipped]
        yield from (Path(at, name) for name in (*directories, *files))


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
