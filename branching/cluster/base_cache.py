"""A cache of bases that were unpacked from archives, by the digest of the archive.

    /var/cache/branching/bases      of root; ~/.cache/branching/bases of others; BRANCHING_CACHE
      3f9a…/                        a base
      3f9a….lock                    its size in bytes; its mtime is the last use
      3f9a….guard                   the lock of its guard (`node_guard`)
      .3f9a…-k3x9q2/                a base that is being unpacked or removed

While a base is unpacked, a process (`draft_guard`) waits for the unpacking process. If that is
killed, it unmounts and removes what was unpacked.

A user of a base holds a shared lock on its lock file. Unpacking and removing require an exclusive
lock. The kernel releases the locks of a process when it ends. A base is renamed to its final name
when it is complete, and is never changed: attempts run in branches of it.

The cache has a size limit (`BYTES_MAX`, BRANCHING_CACHE_BYTES). Adding a base removes the least
recently used ones. A base in use is not removed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from branching._linux.flock import open_lock, try_lock
from branching.cluster.draft_guard import guarded
from branching.errors import MountError
from branching.fs import Workspace

BYTES_MAX = 20 << 30
"""Default size limit of the cache in bytes."""
DIRECTORY_VARIABLE = "BRANCHING_CACHE"
BYTES_VARIABLE = "BRANCHING_CACHE_BYTES"
_CHUNK_BYTES = 1 << 20
_SECTOR_BYTES = 512
"""Unit of `st_blocks`."""


class BaseCache:
    """The unpacked bases of this machine and user.

    Args:
        directory: Where they are. Default: BRANCHING_CACHE, or the user's cache directory.
        bytes_max: Size limit. Default: BRANCHING_CACHE_BYTES, or `BYTES_MAX`.
    """

    def __init__(self, directory: Path | None = None, bytes_max: int | None = None) -> None:
        self.directory = directory or _default_directory()
        self._bases = self.directory / "bases"
        self._bytes_max = _default_bytes_max() if bytes_max is None else bytes_max

    @contextmanager
    def unpacked(
        self, archive: Path | Callable[[IO[bytes]], None], digest: str | None = None
    ) -> Iterator[Path]:
        """Yields the base of an archive, unpacked, which stays for the length of the `with`.

        Args:
            archive: The archive, or a function that writes it into a file. It is not read, or
                called, if its base is here and `digest` is given.
            digest: The archive's digest, as `digest_of` returns it. A function needs it.

        Raises:
            ConflictError, MountError: The archive cannot be unpacked.
            OSError: The cache directory cannot be written.
        """
        if digest is None:
            assert isinstance(archive, Path), "a function needs a digest"
            digest = digest_of(archive)
        base = self._bases / digest
        self._bases.mkdir(parents=True, exist_ok=True, mode=0o755)
        lock = self._locked(digest, is_shared=True)
        try:
            while not base.is_dir():
                os.close(lock)
                lock = self._locked(digest)
                if not base.is_dir():
                    self._unpack(archive, digest, lock)
                os.close(lock)
                lock = self._locked(digest, is_shared=True)
            os.utime(lock)
            yield base
        finally:
            os.close(lock)

    def has(self, digest: str) -> bool:
        """Returns whether the base of an archive is unpacked."""
        return (self._bases / digest).is_dir()

    def guard_path(self, digest: str) -> Path:
        """Returns the lock file of the guard of a base; see `node_guard`."""
        return self._bases / f"{digest}.guard"

    def prune(self, bytes_max: int = 0) -> tuple[int, int]:
        """Removes unused bases until the others have at most `bytes_max` bytes.

        Those unused for longest are removed first.

        Returns:
            The number of removed bases and their size in bytes.
        """
        found = []
        for lock in self._bases.glob("*.lock"):
            try:
                found.append((lock.stat().st_mtime_ns, lock, int(lock.read_text() or 0)))
            except FileNotFoundError:
                pass  # another process removes it
        total = sum(size for _, _, size in found)
        removed, freed = 0, 0
        for _, lock, size in sorted(found):
            if total - freed <= bytes_max:
                break
            if self._remove(lock.stem):
                removed, freed = removed + 1, freed + size
        return removed, freed

    def _locked(self, digest: str, *, is_shared: bool = False) -> int:
        """Locks the base's lock file and returns its descriptor."""
        path = self._bases / f"{digest}.lock"
        return open_lock(
            lambda: os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644),
            path,
            is_shared=is_shared,
        )

    def _unpack(self, archive: Path | Callable[[IO[bytes]], None], digest: str, lock: int) -> None:
        for left in self._bases.glob(f".{digest}-*"):
            shutil.rmtree(left, ignore_errors=True)  # the power failed
        draft = Path(tempfile.mkdtemp(prefix=f".{digest}-", dir=self._bases))
        try:
            with (
                guarded(draft),
                _opened(archive, self._bases, digest) as file,
                Workspace.open(draft) as space,
            ):
                branch = space.load("base", file)
                branch.commit()
                space.prune()
            size = _bytes_in(draft)
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(size).encode(), 0)
            draft.rename(self._bases / digest)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)  # the exception says more
            raise
        self.prune(self._bytes_max)

    def _remove(self, digest: str) -> bool:
        path = self._bases / f"{digest}.lock"
        try:
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            if not try_lock(lock):
                return False
            trash = Path(tempfile.mkdtemp(prefix=f".{digest}-", dir=self._bases))
            if self.has(digest):
                (self._bases / digest).rename(trash / "base")
            path.unlink(missing_ok=True)
            self.guard_path(digest).unlink(missing_ok=True)
            shutil.rmtree(trash)
            return True
        finally:
            os.close(lock)


@contextmanager
def _opened(
    archive: Path | Callable[[IO[bytes]], None], directory: Path, digest: str
) -> Iterator[IO[bytes]]:
    if isinstance(archive, Path):
        with archive.open("rb") as file:
            yield file
        return
    with tempfile.TemporaryFile(dir=directory) as fetched:
        archive(fetched)
        if digest_of_file(fetched) != digest:
            raise MountError(f"the base archive {digest} was damaged in transit")
        yield fetched


def digest_of(archive: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal."""
    with archive.open("rb") as file:
        return digest_of_file(file)


def digest_of_file(file: IO[bytes]) -> str:
    """Returns the SHA-256 of an open file, which is at its beginning afterwards."""
    digest = hashlib.sha256()
    file.seek(0)
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    file.seek(0)
    return digest.hexdigest()


def _default_directory() -> Path:
    if chosen := os.environ.get(DIRECTORY_VARIABLE):
        return Path(chosen).absolute()
    if os.geteuid() == 0:
        return Path("/var/cache/branching")  # commands run as other users, who cannot enter /root
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "branching"


def _default_bytes_max() -> int:
    text = os.environ.get(BYTES_VARIABLE)
    if not text:
        return BYTES_MAX
    if not text.isdecimal():
        raise MountError(f"{BYTES_VARIABLE} must be a number of bytes, not {text!r}")
    return int(text)


def _bytes_in(directory: Path) -> int:
    total = 0
    pending = [os.fspath(directory)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                total += entry.stat(follow_symlinks=False).st_blocks * _SECTOR_BYTES
    return total
