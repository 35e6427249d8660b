"""A branch's files as an agent's tools want them: read, write, list, search, and what has changed.

The branch is a real directory, so everything that any program does in it counts: `changes` asks the
file system, it keeps no log. Paths are relative to the branch; none leads out of it, whatever links
are in it (ValueError, or OSError ELOOP).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from branching.agent.types import FileChange, FileOp
from branching.fs import Branch, Change
from branching.fs.confined_dir import ConfinedDir

VIRTUAL_ENVIRONMENT = ".venv"
GREP_BYTES_MAX = 4 * 1024 * 1024
"""Files that are bigger are not searched."""
BINARY_PROBE_BYTES = 8192
"""A NUL among so many bytes makes a file binary."""
READ_BYTES_MAX = 1 << 30


@dataclass(frozen=True, kw_only=True)
class FileInfo:
    """One entry of a listing."""

    path: str
    is_dir: bool
    size: int
    modified_at: datetime


@dataclass(frozen=True, kw_only=True)
class Match:
    """One line that a search found."""

    path: str
    line_number: int
    line: str


class BranchFiles:
    """The files of one open branch, acted on as the workspace's owner (uid and gid)."""

    def __init__(self, branch: Branch, owner: tuple[int, int]) -> None:
        self._branch = branch
        self.root = branch.path
        self._tree = ConfinedDir(branch.path, owner)

    def exists(self, path: str) -> bool:
        return self._tree.lstat(path) is not None

    def read(self, path: str) -> str:
        """Returns a file as text; bytes that are no UTF-8 are replaced. Raises OSError."""
        return self.read_bytes(path).decode("utf-8", "replace")

    def read_bytes(self, path: str) -> bytes:
        """Returns a file whole. OSError EFBIG above `READ_BYTES_MAX`."""
        return read_whole(self._tree, path)

    def write(self, path: str, content: str | bytes) -> None:
        """Writes a file and makes the directories on the way."""
        self._tree.write(path, content.encode() if isinstance(content, str) else content)

    def edit(self, path: str, old: str, new: str, *, replace_all: bool = False) -> int:
        """Replaces text and returns how often.

        ValueError if the old text is not there, or there more than once without `replace_all`;
        the file is as it was then.
        """
        text = self.read_bytes(path).decode()
        count = text.count(old) if old else 0
        if count == 0:
            raise ValueError(f"the text does not occur in {path}")
        if count > 1 and not replace_all:
            raise ValueError(
                f"the text occurs {count} times in {path}: include more of the lines around it"
            )
        self._tree.write(path, text.replace(old, new).encode())
        return count

    def delete(self, path: str) -> None:
        """Deletes a file, or a directory with all in it. FileNotFoundError if it is not there."""
        self._tree.remove(path)

    def ls_info(self, path: str = ".") -> list[FileInfo]:
        """Lists a directory, in the order of names."""
        entries, _ = self._tree.entries(path, limit=sys.maxsize)
        prefix = "" if path == "." else f"{path}/"
        return [
            _info(prefix + entry.name, found)
            for entry in entries
            if (found := self._tree.lstat(prefix + entry.name)) is not None
        ]

    def glob_info(self, pattern: str, path: str = ".") -> list[FileInfo]:
        """Lists the files below `path` that match; `*` stays in a directory, `**` does not."""
        matches = glob_test(pattern)
        start = 0 if path == "." else len(path) + 1
        return [
            _info(found, about)
            for found, about in self._tree.walk(path)
            if not stat.S_ISDIR(about.st_mode) and matches(found[start:])
        ]

    def grep(self, pattern: str, path: str = ".", glob: str | None = None) -> list[Match]:
        """Searches text files for a regular expression. Raises re.error if it is invalid."""
        expression = re.compile(pattern)
        matches = glob_test(glob) if glob else None
        about = self._tree.lstat(path)
        is_file = about is not None and stat.S_ISREG(about.st_mode)
        found = []
        for name, info in [(path, about)] if is_file else self._tree.walk(path):
            if info is None or not stat.S_ISREG(info.st_mode) or info.st_size > GREP_BYTES_MAX:
                continue
            if matches and not matches(name) and not matches(name.rpartition("/")[2]):
                continue
            try:
                data, _ = self._tree.read(name, limit=GREP_BYTES_MAX)
            except OSError:
                continue  # it went, or may not be read
            if b"\0" in data[:BINARY_PROBE_BYTES]:
                continue
            for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
                if expression.search(line):
                    found.append(Match(path=name, line_number=number, line=line))
        return found

    def changes(self) -> list[FileChange]:
        """Lists what the branch has changed, the oldest change first. A new list each time."""
        told = [one for change in self._branch.diff() for one in _told(change, self._tree)]
        return sorted(told, key=lambda change: (change.timestamp, change.path))

    def deleted(self) -> set[str]:
        """Returns the paths that the branch has deleted."""
        return {change.path for change in self.changes() if change.op in ("delete", "rmdir")}

    @contextmanager
    def snapshot(self, *, include_venv: bool = False) -> Iterator[Path]:
        """Copies the branch's files to a temporary directory, for the length of the `with`.

        `.venv` is left out, or linked to with `include_venv`. A branch is a directory itself: this
        is for what must see no further change.
        """
        with tempfile.TemporaryDirectory(prefix="branching-snapshot-") as made:
            target = Path(made) / "files"

            def left_out(directory: str, names: list[str]) -> set[str]:
                is_root = Path(directory) == self.root
                return {VIRTUAL_ENVIRONMENT} & {*names} if is_root else set()

            shutil.copytree(self.root, target, symlinks=True, ignore=left_out)
            if include_venv and self.exists(VIRTUAL_ENVIRONMENT):
                (target / VIRTUAL_ENVIRONMENT).symlink_to(self.root / VIRTUAL_ENVIRONMENT)
            yield target


def read_whole(tree: ConfinedDir, path: str, *, most: int = READ_BYTES_MAX) -> bytes:
    """Returns a file's content. OSError EFBIG if it has more bytes than that."""
    data, size = tree.read(path, limit=most)
    if size > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", path)
    return data


def _told(change: Change, tree: ConfinedDir) -> Iterator[FileChange]:
    """A change of the file system's as changes of an agent's: a rename is a delete and a write."""
    is_directory = change.kind == "directory"
    when = _when(change, tree)
    gone = change.path if change.change == "deleted" else change.origin
    if gone is not None:
        yield FileChange(path=gone, op="rmdir" if is_directory else "delete", timestamp=when)
    if change.change == "deleted":
        return
    if is_directory and change.change not in ("added", "renamed", "type"):
        return  # a directory's attributes: no change of a file
    op: FileOp = "mkdir" if is_directory else "edit"
    if not is_directory and change.change in ("added", "renamed"):
        op = "write"
    yield FileChange(path=change.path, op=op, timestamp=when)


def _when(change: Change, tree: ConfinedDir) -> datetime:
    """Returns the mtime of a path; for a missing path, that of its directory."""
    path = change.path
    while (found := tree.lstat(path)) is None:
        path = path.rpartition("/")[0] or "."
    return datetime.fromtimestamp(found.st_ctime, timezone.utc)


def _info(path: str, found: os.stat_result) -> FileInfo:
    return FileInfo(
        path=path,
        is_dir=stat.S_ISDIR(found.st_mode),
        size=found.st_size,
        modified_at=datetime.fromtimestamp(found.st_mtime, timezone.utc),
    )


def glob_test(pattern: str) -> Callable[[str], bool]:
    """Returns the test for a glob of paths."""
    parts = []
    for piece in re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]*\])", pattern):
        if piece == "**/":
            parts.append(r"(?:.*/)?")
        elif piece == "**":
            parts.append(r".*")
        elif piece == "*":
            parts.append(r"[^/]*")
        elif piece == "?":
            parts.append(r"[^/]")
        elif piece.startswith("["):
            parts.append(piece.replace("[!", "[^", 1))
        else:
            parts.append(re.escape(piece))
    expression = re.compile("".join(parts) + r"\Z", re.DOTALL)
    return lambda path: expression.match(path) is not None
