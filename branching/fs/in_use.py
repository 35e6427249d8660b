"""Locks that keep a branch from being committed while something runs in it, in any process.

    STORE/agents/using-7    of the branch with the id 7; empty

Who runs something in a branch holds the file's lock shared (`held`), who commits or rebases it
holds it alone (`held_alone`) and is refused while others hold it. The kernel gives up a lock with
its process, however that ends. The last holder removes the file, while it holds the lock alone: so
a lock counts only if the file is still at its path. A file that a killed process left is removed by
the next commit of the branch, or when the workspace is next opened (`sweep`).

There are no locks where the store cannot be seen or written: the branches of another user.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from branching.errors import BranchError, CommitError
from branching.fs.backend import Backend, BranchRecord
from branching.fs.branch_leases import agents_directory, remove_agents_directory
from branching.fs.store_files import open_directory, open_file

PREFIX = "using-"
COMMIT_SECONDS_MAX = 60.0
"""How long a start waits for a commit of the branch that is under way."""
RELEASE_SECONDS_MAX = 0.2
"""How long a commit waits: the last holder has the lock alone while it removes the file."""
POLL_SECONDS = 0.01
COMMAND_CHARACTERS_MAX = 80
_NOT_WRITABLE = (errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


@contextmanager
def held(backend: Backend, record: BranchRecord) -> Iterator[None]:
    """Keeps the branch from being committed for the length of the `with`.

    Raises:
        BranchError: Another process has been committing the branch for `COMMIT_SECONDS_MAX`.
    """
    path = _path(backend, record)
    file = None
    if path is not None:
        try:
            file = _locked(backend, path, fcntl.LOCK_SH, COMMIT_SECONDS_MAX)
        except BlockingIOError as error:
            raise BranchError(
                f"branch {record.name!r} is being committed by another process: nothing was run",
                hint="wait for the end of the commit, then try again",
                branch=record.name,
            ) from error
    try:
        yield
    finally:
        if path is not None and file is not None:
            _release(path, file)


@contextmanager
def held_alone(backend: Backend, record: BranchRecord, what: str) -> Iterator[None]:
    """Keeps everything from being started in the branch for the length of the `with`.

    Raises:
        CommitError: Something runs in the branch. `what` says what was not done ("committed").
    """
    path = _path(backend, record)
    file = None
    if path is not None:
        try:
            file = _locked(backend, path, fcntl.LOCK_EX, RELEASE_SECONDS_MAX)
        except BlockingIOError as error:
            raise CommitError(
                f"branch {record.name!r} was not {what}: {_holders(path)} runs something in it. "
                "Nothing was changed",
                hint="wait for its end or stop it (branching watch), then try again; "
                "branching abort drops the branch",
                branch=record.name,
            ) from error
    try:
        yield
    finally:
        if path is not None and file is not None:
            _release(path, file)


def sweep(backend: Backend) -> None:
    """Removes the files of processes that were killed."""
    directory = agents_directory(backend)
    names: list[str] = []
    with suppress(OSError):  # nothing was ever held, or it is another user's
        if directory is not None:
            here = open_directory(directory)
            try:
                names = [name for name in os.listdir(here) if name.startswith(PREFIX)]  # noqa: PTH208
            finally:
                os.close(here)
    for name in names:
        assert directory is not None, "it was listed"
        with suppress(OSError):
            _release(directory / name, open_file(directory / name))


def _path(backend: Backend, record: BranchRecord) -> Path | None:
    directory = agents_directory(backend)
    return None if directory is None else directory / f"{PREFIX}{record.id}"


def _locked(backend: Backend, path: Path, how: int, seconds_max: float) -> int | None:
    """Returns the locked file; None where the store cannot be written.

    Raises:
        BlockingIOError: Others hold it, and still did after `seconds_max`.
        BranchError: Something else is in its place: a link, a directory.
    """
    deadline = time.monotonic() + seconds_max
    while True:
        try:
            file = _opened(backend, path)
        except FileNotFoundError:
            if not path.parent.parent.is_dir():
                return None  # the store is not visible, or gone
            continue  # the directory was removed by the last holder of another file
        except OSError as error:
            if error.errno in _NOT_WRITABLE:
                return None
            raise BranchError(
                f"the lock of the branch cannot be opened: {error.strerror}: {path}",
                hint="remove what is in its place",
                path=str(path),
            ) from error
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
            if _is_at(file, path):
                return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(file)
                raise
        os.close(file)
        time.sleep(POLL_SECONDS)


def _opened(backend: Backend, path: Path) -> int:
    uid, gid = backend.owner
    with suppress(FileExistsError):
        path.parent.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(path.parent, uid, gid, follow_symlinks=False)
    file = open_file(path, os.O_RDWR | os.O_CREAT)
    if os.geteuid() == 0:
        os.fchown(file, uid, gid)
    return file


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False


def _release(path: Path, file: int) -> None:
    """Unlocks and closes the file, and removes it if nobody else has locked it."""
    try:
        with suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):
                path.unlink()
                remove_agents_directory(path.parent)
    finally:
        # Not by closing alone: a process that was forked meanwhile has the file open, too.
        fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def _holders(path: Path) -> str:
    """Returns what holds the lock, for people, as far as the kernel tells."""
    try:
        inode = path.stat().st_ino
        rows = [row.split() for row in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        rows = []
    pids = [row[4] for row in rows if row[1] == "FLOCK" and row[5].endswith(f":{inode}")]
    for pid in pids:
        if pid == str(os.getpid()):
            return "this program"
        with suppress(OSError):
            words = Path("/proc", pid, "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            line = " ".join(word.decode(errors="replace") for word in words)
            return f"process {pid} ({line[:COMMAND_CHARACTERS_MAX]})"
    return "another process"
