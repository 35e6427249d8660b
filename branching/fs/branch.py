"""A branch: a directory whose changes are applied to its parent or dropped, all or none.

A Branch object is a handle of one branch of the file system. Entering the `with` creates the
branch. Leaving it commits the branch on a clean exit and aborts it on an exception, unless options
leave it open. States:

    new ── __enter__ ──> open ── commit() ──> committed
                          └───── abort() ───> aborted

A partial commit leaves the branch open with the rest, also after a clean exit of the `with`.

`async with` does the same without blocking the event loop. A cancelled task aborts the branch, as
any exception does.

No lock protects the state: use a Branch only in the thread that opened it. Different branches can
be used from different threads concurrently.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Literal

from branching._signals import defer_sigint
from branching._threads import run_in_thread
from branching.errors import (
    BranchError,
    BranchingError,
    BranchNotFoundError,
    BranchStaleError,
    ConflictError,
    RecoveryError,
    add_note,
)
from branching.fs.backend import MAIN_ID, Backend, BranchRecord, Change, Policy
from branching.fs.branch_leases import creating, end_lease
from branching.fs.in_use import held, held_alone

NAME_BYTES_MAX = 254
"""A directory entry can have 255 bytes, and that of a branch starts with `@`."""

_READS_MAX = 10
"""How often the changes of a branch are read while processes rename and delete in it."""
_READ_AGAIN_SECONDS = 0.01

OnSuccess = Literal["commit"] | None
OnError = Literal["abort"] | None


class Branch:
    """A branch of a workspace, created by entering its `with` statement.

    Objects of this class come from `Workspace.branch()`, `Workspace.reopen()` and
    `Branch.branch()`.
    """

    def __init__(
        self,
        backend: Backend,
        name: str,
        *,
        parent_id: int,
        parent_path: str,
        on_success: OnSuccess = "commit",
        on_error: OnError = "abort",
        disk_limit: int | None = None,
    ) -> None:
        check_name(name)
        _check_disk_limit(disk_limit)
        if on_success not in ("commit", None):
            raise ValueError(f'on_success must be "commit" or None, not {on_success!r}')
        if on_error not in ("abort", None):
            raise ValueError(f'on_error must be "abort" or None, not {on_error!r}')
        self._backend = backend
        self._name = name
        self._parent_id = parent_id
        self._parent_path = parent_path
        self._on_success = on_success
        self._on_error = on_error
        self._disk_limit = disk_limit
        self._record: BranchRecord | None = None
        self._ended: str | None = None
        self.is_leased = on_success == "commit" and on_error == "abort"
        """True if the branch is dropped when this process is killed. Its `with` always ends it."""
        self.forgotten: list[str] = []
        """After a commit: branch names of earlier commits that can no longer be undone."""
        self.commit_id: int | None = None
        """After a commit: its id in the history, for `Workspace.undo`; None if it has no entry."""
        self.remaining = 0
        """After a commit: number of changed paths that stay in the branch, uncommitted."""
        self._is_rest = False
        self._pid = os.getpid()

    @classmethod
    def of(cls, backend: Backend, record: BranchRecord) -> Branch:
        """Returns a handle of a branch that is already open.

        Args:
            backend: The mount of the branch.
            record: The branch.

        Returns:
            The branch. It stays open until `commit` or `abort`.
        """
        parent_path = record.branch_path.rpartition("/")[0]
        branch = cls(backend, record.name, parent_id=record.parent, parent_path=parent_path)
        branch._record = record
        return branch

    @property
    def name(self) -> str:
        """Name of the branch."""
        return self._name

    @property
    def path(self) -> Path:
        """The directory that shows the branch.

        Raises:
            BranchError: The branch is not created yet.
        """
        return self._opened().path

    @property
    def seen_at(self) -> Path:
        """The path at which commands in the branch see it; see `Workspace.seen_at`."""
        return self._backend.seen_at

    @property
    def branch_path(self) -> str:
        """Path in the tree of branches: `/main/outer/inner`."""
        return self._record.branch_path if self._record else f"{self._parent_path}/{self._name}"

    @property
    def has_base_record(self) -> bool:
        """Whether it was loaded from an archive that records the state it was made against."""
        return bool(self._record and self._record.has_base_record)

    @property
    def is_open(self) -> bool:
        """Whether it was created, and not committed or aborted through this object."""
        return self._record is not None and self._ended is None

    def check_call(
        self, *, is_nested: bool = False, is_part: bool = False, is_compared: bool = False
    ) -> None:
        """Checks that a call can succeed on this file system; see `Backend.check_call`.

        Args:
            is_nested: The call creates nested branches.
            is_part: The call commits a part of the changed paths.
            is_compared: The call lists the changed paths.

        Raises:
            MountError: The file system does not support one of them.
        """
        self._backend.check_call(is_nested=is_nested, is_part=is_part, is_compared=is_compared)

    def branch(
        self,
        name: str,
        on_success: OnSuccess = "commit",
        on_error: OnError = "abort",
        *,
        disk_limit: int | None = None,
    ) -> Branch:
        """Returns a child of this branch, to be used in a `with` statement.

        The child commits into this branch. While a child is open, this branch is frozen: writes in
        it fail with EROFS. Bytes that the child adds also count towards this branch's disk limit.

        Args:
            name: Name of the child.
            on_success: None leaves the child open after a clean exit.
            on_error: None leaves the child open after an exception.
            disk_limit: Bytes that the child may add. Writes above it fail with EDQUOT. Default: no
                limit.

        Returns:
            The child, not yet created.

        Raises:
            BranchError: This branch is not created yet.
            TypeError: `name` or `disk_limit` has the wrong type.
            ValueError: `name` cannot be a branch name, or an option has an invalid value.
        """
        return Branch(
            self._backend,
            name,
            parent_id=self._opened().id,
            parent_path=self.branch_path,
            on_success=on_success,
            on_error=on_error,
            disk_limit=disk_limit,
        )

    def commit(
        self,
        *,
        force: bool = False,
        skip: bool = False,
        only: Sequence[str] = (),
        exclude: Sequence[str] = (),
        drop_rest: bool = False,
        policy: Policy | None = None,
        rebase: bool = False,
        dry_run: bool = False,
    ) -> list[Change]:
        """Applies the branch to its parent, all or nothing, and closes it.

        If `only`, `exclude` or `skip` leave changed paths, the branch stays open with them, on top
        of the new content of its parent, and `remaining` is their number. A clean exit of its
        `with` then leaves it open too: `commit` or `abort` it later. Open files of the branch
        become stale. On a branch that has ended, this does nothing and returns an empty list.

        Args:
            force: Commit the branch's version of paths that were changed elsewhere since the
                branch depended on them.
            skip: Leave these paths out of the commit.
            only: Glob patterns of the paths to commit. If `only` and `exclude` leave no changed
                path, the commit is refused, because the work would be lost.
            exclude: Glob patterns of paths to leave out.
            drop_rest: Drop the paths that were left out, and close the branch.
            policy: The rule for siblings. Default: the mount's policy.
            rebase: Rebase the branch first if it is stale. Without it, a stale branch is a
                conflict.
            dry_run: Return what a commit would change, or raise what it would raise, without
                changing anything.

        Returns:
            The changes to the parent. For commits to main, a change also names the privileges
            that its file gives to all users who execute it.

        Raises:
            ConflictError: A sibling was committed first, or the same paths were changed elsewhere.
                Parent and branch are unchanged.
            CommitError: The branch is in use (see `in_use`, also with `force`), or the file system
                refused the commit. Parent and branch are unchanged.
            RecoveryError: The commit was applied but not completed. This object is closed.
        """
        record = self._opened()
        if self._ended is not None:
            return []
        try:
            with nullcontext() if dry_run else held_alone(self._backend, record, "committed"):
                committed = self._backend.commit(
                    record,
                    force=force,
                    skip=skip,
                    only=only,
                    exclude=exclude,
                    drop_rest=drop_rest,
                    policy=policy,
                    rebase=rebase,
                    dry_run=dry_run,
                )
        except RecoveryError:
            self._end("committed")  # an abort at the end of the `with` must not follow
            raise
        self.remaining = committed.remaining
        if self.remaining and not dry_run:
            self._is_rest = True
            self.release()  # the rest of a partial commit must survive the end of this process
        elif not dry_run:
            self._end("committed")
        self.forgotten = committed.forgotten
        self.commit_id = committed.commit
        if record.parent != MAIN_ID:
            return committed.changes
        return _with_privileges(record.path if dry_run else self._backend.base, committed.changes)

    def rebase(self, *, force: bool = False, dry_run: bool = False) -> list[str]:
        """Forks the branch again from its parent's present state, with its changes on top.

        Makes a stale branch live again. A live branch then also shows changes committed to its
        parent since the fork. No data is copied. Open files of the branch become stale.

        Args:
            force: Keep the branch's version of paths that were also changed in the parent.
            dry_run: Report conflicts without changing anything.

        Returns:
            The conflicting paths of which the branch's version was kept; empty without `force`.

        Raises:
            ConflictError: Branch and parent both changed the `paths` that it lists. The branch is
                unchanged.
            CommitError: The branch is in use, has live children, files open for writing, or a
                stale parent, or the file system refused. The branch is unchanged.
            RecoveryError: The branch was rebased, and the store must be recovered.
        """
        record = self._opened()
        with nullcontext() if dry_run else held_alone(self._backend, record, "rebased"):
            return self._backend.rebase(record, force=force, dry_run=dry_run)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Returns a context in which no process can commit or rebase the branch.

        All code that runs commands in branches uses it: the patterns, `BranchContext`, `branching
        run` and `shell`, the MCP server and agents. A commit is refused in the meantime, even with
        `force`, and the error names the process. If the lock cannot be made, for example because
        the store belongs to another user, a warning says so.
        """
        with held(self._backend, self._opened()):
            yield

    def abort(self) -> None:
        """Drops the branch, its changes and its children. Its parent is unchanged.

        Does nothing if the branch has ended.

        Raises:
            AbortError: The branch could not be dropped. It still exists.
        """
        record = self._opened()
        if self._ended is None:
            self._backend.abort(record)
            self._end("aborted")

    def detached_mount(self) -> int | None:
        """Returns a descriptor of a mount of the branch that is attached nowhere.

        It is for a program that may not clone mounts itself. None where the daemon sends none: it
        does so where branches are mounts of their own (the overlay driver).
        """
        return self._backend.detached_mount(self._opened())

    def release(self) -> None:
        """Keeps the branch open even if this process is killed."""
        if self._record is not None and self.is_leased:
            self.is_leased = False
            end_lease(self._backend, self._record)

    def _end(self, how: str) -> None:
        self._ended = how
        self.release()

    def diff(self, *, count_lines: bool = False) -> list[Change]:
        """Returns the differences between the branch and its parent.

        While processes write in the branch, a path may go while it is read. The differences are
        then read again, some times.

        Args:
            count_lines: Also count the added and removed lines of each file.

        Returns:
            The changes, sorted by path.
        """
        record = self._opened()
        for _ in range(_READS_MAX - 1):
            try:
                return self._backend.diff(record, count_lines=count_lines)
            except BranchError as error:
                if type(error) is not BranchError:
                    raise  # the branch is gone, or stale
                time.sleep(_READ_AGAIN_SECONDS)
        return self._backend.diff(record, count_lines=count_lines)

    def patch(self, file: IO[bytes]) -> int:
        """Writes the changes of the branch to an open file, as a patch for `git apply`.

        Args:
            file: A file open for writing.

        Returns:
            The number of changes that a patch cannot represent (owners, empty directories, special
            files). Comment lines in the patch list them.

        Raises:
            BranchError: The patch could not be written completely.
        """
        file.flush()
        return self._backend.patch(self._opened(), file.fileno())

    def export(self, file: IO[bytes], *, whole: bool = False, exclude: Sequence[str] = ()) -> None:
        """Writes the changes of the branch to an open file, as an OCI layer (a tar archive).

        `Workspace.load` creates a branch from it, in this or another workspace.

        Args:
            file: A file open for writing.
            whole: Write all that the branch shows, as a layer over an empty directory.
            exclude: Glob patterns of paths to leave out, with everything below them.

        Raises:
            BranchError: The archive could not be written completely. The file is not usable.
        """
        file.flush()
        self._backend.export(self._opened(), file.fileno(), whole=whole, exclude=exclude)

    def load(
        self, name: str, file: IO[bytes], *, force: bool = False, leased: bool = False
    ) -> Branch:
        """Creates a child of this branch from an archive; see `Workspace.load`.

        Args:
            name: Name of the child, which is left open.
            file: The archive, open for reading.
            force: Load the archive also over paths that have changed since it was made.
            leased: Drop the child if this process is killed.

        Returns:
            The child.

        Raises:
            ConflictError: The `paths` that it lists have changed since the archive was made.
                There is no child.
            MountError: The archive is damaged, leads out of the workspace, or needs rights that
                the process lacks. There is no child.
            ValueError: The name is impossible.
        """
        check_name(name)
        return load_branch(self._backend, name, self._opened().id, file, force=force, leased=leased)

    def inspect(self) -> BranchRecord:
        """Returns the present state of the branch, with its disk use.

        Raises:
            BranchNotFoundError: The branch no longer exists.
        """
        record = self._opened()
        for known in self._backend.branches():
            if known.id == record.id:
                return known
        raise BranchNotFoundError(f"branch {self._name!r} is gone", branch=self._name)

    def is_stale(self) -> bool:
        """Returns whether the branch is stale or no longer exists."""
        try:
            return self.inspect().state == "stale"
        except BranchNotFoundError:
            return True

    def __repr__(self) -> str:
        state = self._ended or ("open" if self._record else "not open yet")
        return f"<Branch {self.branch_path} ({state})>"

    def __enter__(self) -> Branch:
        if self._record is not None:
            raise BranchError(
                f"branch {self._name!r} was opened before: a Branch object serves one `with`",
                hint="call .branch() again for another one",
                branch=self._name,
            )
        try:
            with (
                defer_sigint(),
                creating(self._backend) if self.is_leased else nullcontext() as new,
            ):
                self._record = self._backend.create(
                    self._name,
                    self._parent_id,
                    disk_limit=self._disk_limit,
                    leases=None if new is None else new.file,
                )
                if new is not None:
                    new.record = self._record
        except KeyboardInterrupt:
            if self.is_open:
                self.abort()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._ended is not None or self._pid != os.getpid():
            return  # in a child process forked inside the `with`: the parent ends the branch
        # A file of a DaxFS branch tells of the lost race before the commit does.
        was_stale = _is_estale(error) and self._backend.fstype == "daxfs" and self.is_stale()
        with defer_sigint():
            if kind is None and self._on_success == "commit" and not self._is_rest:
                self._commit_at_exit()
            elif kind is not None and self._on_error == "abort":
                try:
                    self.abort()
                except BranchingError as failure:
                    # The caller must see the original exception.
                    add_note(error, f"and its branch stays open: {failure}")
            self.release()
        if was_stale:
            raise BranchStaleError(
                f"branch {self._name!r} is stale: a sibling was committed first ({error})",
                hint="try again in a new branch",
                branch=self._name,
            ) from error

    async def __aenter__(self) -> Branch:
        try:
            return await run_in_thread(self.__enter__)
        except BaseException:
            if self.is_open:  # created before the thread noticed the cancellation
                await run_in_thread(self.abort)
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await run_in_thread(lambda: self.__exit__(kind, error, traceback))

    def _commit_at_exit(self) -> None:
        try:
            self.commit()
        except (BranchStaleError, ConflictError) as conflict:
            # After a lost race the work is of no use. After any other conflict it can still be
            # committed (`force`, `skip`), so the branch stays open.
            if not conflict.paths:
                self.abort()
            self.release()
            raise

    def _opened(self) -> BranchRecord:
        if self._record is None:
            raise BranchError(
                f"branch {self._name!r} is not open yet",
                hint=f"open it first: with workspace.branch({self._name!r}) as branch: ...",
                branch=self._name,
            )
        return self._record


def _is_estale(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno == errno.ESTALE


def check_name(name: str) -> None:
    """Checks that `name` is a valid branch name, by the rules in branchfs/docs/control.md.

    Args:
        name: The name.

    Raises:
        TypeError: It is not a string.
        ValueError: It is not a valid name.
    """
    if not isinstance(name, str):
        raise TypeError(f"a branch name must be a string, not {type(name).__name__}")
    if reason := _fault(name):
        raise ValueError(f"{name!r} cannot be the name of a branch: {reason}")


def _with_privileges(top: Path, changes: list[Change]) -> list[Change]:
    """Adds to each changed file below `top` the privileges it gives to users who execute it."""
    return [
        replace(change, privileges=found)
        if change.kind == "file"
        and change.change != "deleted"
        and (found := _privileges(top / change.path))
        else change
        for change in changes
    ]


def _privileges(path: Path) -> tuple[str, ...]:
    try:
        mode = os.lstat(path).st_mode
        names = os.listxattr(path, follow_symlinks=False)
    except OSError:
        return ()  # changed in the meantime, or not readable for us
    return tuple(
        name
        for name, is_given in (
            ("set-user-ID", mode & stat.S_ISUID),
            # Without the right to execute this bit means something else.
            ("set-group-ID", mode & stat.S_ISGID and mode & stat.S_IXGRP),
            ("capabilities", "security.capability" in names),
        )
        if is_given
    )


def _check_disk_limit(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"disk_limit must be a whole number of bytes, not {value!r}")
    if value <= 0:
        raise ValueError(f"disk_limit must be more than zero, not {value}; None is no limit")


def _fault(name: str) -> str | None:
    if name in ("", ".", ".."):
        return "it is empty, `.` or `..`"
    if name.startswith("@"):
        return "it starts with `@`"
    if "/" in name:
        return "it has a `/`"
    if any(ord(character) < 32 or ord(character) == 127 for character in name):
        return "it has a control character"
    if name == "main":
        return "it is reserved for the root branch"
    try:
        encoded = os.fsencode(name)
        encoded.decode()
    except UnicodeError:
        return "it is not UTF-8"
    if len(encoded) > NAME_BYTES_MAX:
        return f"it is longer than {NAME_BYTES_MAX} bytes"
    return None


def load_branch(
    backend: Backend, name: str, parent: int, file: IO[bytes], *, force: bool, leased: bool
) -> Branch:
    """Creates a branch from an archive; see `Workspace.load`."""
    with creating(backend) if leased else nullcontext() as new:
        leases = None if new is None else new.file
        record = backend.load(name, parent, file.fileno(), force=force, leases=leases)
        if new is not None:
            new.record = record
    branch = Branch.of(backend, record)
    branch.is_leased = leased
    return branch
