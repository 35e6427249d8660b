"""Locks that prevent the commit of a branch while a command of any process runs in it.

    STORE/agents/using-7    of the branch with the id 7; empty

A process that runs something in a branch holds a shared lock on the file (`held`). A commit or
rebase takes an exclusive lock (`held_alone`) and is refused while shared locks are held. The kernel
releases the locks of a process when it ends. The last holder removes the file while it holds an
exclusive lock, so after locking a file each process checks that it is still at its path. A file
that a killed process left is removed by the next commit of the branch, or when the workspace is
opened (`sweep`).

`branchfs commit` and `branchfs rebase` take the same lock. There are no locks where the store
cannot be seen or written, such as that of another user or one on a full disk: `held` warns then.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from branching._linux.flock import is_at, open_lock, try_lock, unlock
from branching.errors import BranchError, CommitError
from branching.fs.backend import Backend, BranchRecord
from branching.fs.branch_leases import (
    agents_directory,
    in_agents_directory,
    remove_agents_directory,
)
from branching.fs.store_files import open_directory, open_file

PREFIX = "using-"
COMMIT_SECONDS_MAX = 60.0
"""How long a command that starts waits for a running commit of the branch."""
RELEASE_SECONDS_MAX = 0.2
"""How long a commit waits for the last holder, which has an exclusive lock during removal."""
COMMAND_CHARACTERS_MAX = 80
_NOT_WRITABLE = (errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


@contextmanager
def held(backend: Backend, record: BranchRecord) -> Iterator[None]:
    """Prevents the commit of a branch for the length of the `with`.

    Warns if the lock cannot be made: then other processes can commit the branch.

    Raises:
        BranchError: Another process has been committing the branch for `COMMIT_SECONDS_MAX`.
    """
    path = _path(backend, record)
    file = None
    if path is not None:
        try:
            file = _locked(backend, path, COMMIT_SECONDS_MAX, is_shared=True)
        except BlockingIOError as error:
            raise BranchError(
                f"branch {record.name!r} is being committed by another process: nothing was run",
                hint="wait for the end of the commit, then try again",
                branch=record.name,
            ) from error
        if file is None:
            warnings.warn(
                f"other processes can commit branch {record.name!r} while something runs in it: "
                f"its lock cannot be made in {path.parent}",
                stacklevel=4,
            )
    try:
        yield
    finally:
        if path is not None and file is not None:
            _release(path, file)


@contextmanager
def held_alone(backend: Backend, record: BranchRecord, what: str) -> Iterator[None]:
    """Prevents commands from starting in a branch for the length of the `with`.

    Raises:
        CommitError: A process runs in the branch. `what` is the refused action ("committed").
    """
    path = _path(backend, record)
    file = None
    if path is not None:
        try:
            file = _locked(backend, path, RELEASE_SECONDS_MAX)
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
    """Removes the lock files of processes that were killed, and their unfinished lease files."""
    directory = agents_directory(backend)
    names: list[str] = []
    with suppress(OSError):  # no lock was ever taken, or the store is another user's
        if directory is not None:
            here = open_directory(directory)
            try:
                names = [name for name in os.listdir(here) if name.startswith((PREFIX, "."))]  # noqa: PTH208
            finally:
                os.close(here)
    for name in names:
        assert directory is not None, "it was listed"
        with suppress(OSError):
            _release(directory / name, open_file(directory / name))
    if directory is not None:
        remove_agents_directory(directory)


def _path(backend: Backend, record: BranchRecord) -> Path | None:
    directory = agents_directory(backend)
    return None if directory is None else directory / f"{PREFIX}{record.id}"


def _locked(
    backend: Backend, path: Path, seconds_max: float, *, is_shared: bool = False
) -> int | None:
    """Returns the locked file; None where the store cannot be written.

    Raises:
        BlockingIOError: Others hold it, and still did after `seconds_max`.
        BranchError: Something else is in its place: a link, a directory.
    """
    try:
        return open_lock(
            lambda: _opened(backend, path), path, is_shared=is_shared, seconds_max=seconds_max
        )
    except FileNotFoundError:
        return None  # the store is not visible, or was removed
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno in _NOT_WRITABLE:
            return None
        raise BranchError(
            f"the lock of the branch cannot be opened: {error.strerror}: {path}",
            hint="remove what is in its place",
            path=str(path),
        ) from error


def _opened(backend: Backend, path: Path) -> int:
    file = in_agents_directory(
        backend, lambda _, here: open_file(path.name, os.O_RDWR | os.O_CREAT, directory=here)
    )
    if os.geteuid() == 0:
        os.fchown(file, *backend.owner)
    return file


def _release(path: Path, file: int) -> None:
    """Unlocks and closes the file, and removes it if no other process has locked it."""
    try:
        with suppress(FileNotFoundError):
            if try_lock(file) and is_at(file, path):
                path.unlink()
                remove_agents_directory(path.parent)
    finally:
        # Closing is not enough: a process forked meanwhile has the file open, too.
        unlock(file)
        os.close(file)


def _holders(path: Path) -> str:
    """Returns a description of the process that holds the lock, from /proc/locks."""
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
