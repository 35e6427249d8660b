"""A branch: a directory of its own that becomes part of its parent, or never was.

A Branch object is the handle of one branch of the file system. `with` makes the branch and ends
it: committed on a clean exit, aborted on an exception, left open where told so. States:

    new ── __enter__ ──> open ── commit() ──> committed
                          └───── abort() ───> aborted

A commit of a part leaves the branch open with the rest, also after a clean exit of the `with`.

`async with` does the same without blocking the event loop. A cancelled task aborts the branch, as
any exception does.

The state changes under no lock: a branch belongs to the thread that opened it. Different branches
may be used from different threads at once.
"""

from __future__ import annotations

import errno
import os
import stat
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
from branching.fs.branch_leases import end_lease, lease
from branching.fs.in_use import held, held_alone

NAME_BYTES_MAX = 254
"""A directory entry can have 255 bytes, and the branch's has an `@` in front."""

OnSuccess = Literal["commit"] | None
OnError = Literal["abort"] | None


class Branch:
    """One branch. Made by `Workspace.branch()` or `Branch.branch()`, opened by `with`."""

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
        """It is dropped if this process is killed while it is open: its `with` ends it always."""
        self.forgotten: list[str] = []
        """After a commit: branch names of earlier commits that can no longer be undone."""
        self.remaining = 0
        """After a commit: changed paths that were not committed. The branch is open with them."""
        self._is_rest = False
        self._pid = os.getpid()

    @classmethod
    def of(cls, backend: Backend, record: BranchRecord) -> Branch:
        """Returns a handle of a branch that is open already. It ends by `commit` or `abort`."""
        parent_path = record.branch_path.rpartition("/")[0]
        branch = cls(backend, record.name, parent_id=record.parent, parent_path=parent_path)
        branch._record = record
        return branch

    @property
    def name(self) -> str:
        """The name it was given."""
        return self._name

    @property
    def path(self) -> Path:
        """The directory that shows the branch. BranchError before `with` has opened it."""
        return self._opened().path

    @property
    def seen_at(self) -> Path:
        """The path at which commands in the branch see it: `Workspace.seen_at`."""
        return self._backend.seen_at

    @property
    def branch_path(self) -> str:
        """Its place in the tree of branches: `/main/outer/inner`."""
        return self._record.branch_path if self._record else f"{self._parent_path}/{self._name}"

    @property
    def has_base_record(self) -> bool:
        """Whether it was loaded from an archive that says what it was made against."""
        return bool(self._record and self._record.has_base_record)

    @property
    def is_open(self) -> bool:
        """It was made, and neither committed nor aborted through this object."""
        return self._record is not None and self._ended is None

    def check_call(
        self, *, is_nested: bool = False, is_part: bool = False, is_compared: bool = False
    ) -> None:
        """Raises MountError if a call cannot succeed on this file system: see `Backend`."""
        self._backend.check_call(is_nested=is_nested, is_part=is_part, is_compared=is_compared)

    def branch(
        self,
        name: str,
        on_success: OnSuccess = "commit",
        on_error: OnError = "abort",
        *,
        disk_limit: int | None = None,
    ) -> Branch:
        """Returns a child of this branch, to be opened by `with`. It commits into this branch.

        While a child is open this branch is frozen: writes in it answer EROFS. What the child
        adds counts in this branch's disk limit too.
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
        """Applies the branch to its parent, all or nothing, and closes it; returns what changed.

        If `only`, `exclude` or `skip` leave changed paths, the branch stays open with them, on top
        of the new content of its parent, and `remaining` is their number. A clean exit of its
        `with` then leaves it open too: `commit` or `abort` it, now or later. Open files of the
        branch become stale. `drop_rest` drops these paths and closes the branch.

        Where a path of the base was changed by others since the branch depended on it, `force`
        takes the branch's side and `skip` the others'. `only` and `exclude` are patterns of the
        paths to commit. `policy` says what becomes of the siblings, if not what the mount says.
        `rebase` rebases a stale branch first; without it a stale branch is a conflict.
        A change says if its file gives rights of its owner or group to all who execute it.
        `dry_run` tells what would be changed, or raises what would be raised, and does nothing.
        On a branch that has ended already this does nothing and returns []. Where `only` and
        `exclude` leave nothing of what was changed the commit is refused: the work would be lost.

        Raises ConflictError when a sibling was committed first, or others changed the same paths,
        and CommitError when something runs in the branch (`in_use`, also with `force`) or the file
        system refused. Parent and branch are then as before. Raises
        RecoveryError when the commit was applied but not completed; this object is then closed.
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
            self.release()  # it is work that was kept
        elif not dry_run:
            self._end("committed")
        self.forgotten = committed.forgotten
        if record.parent != MAIN_ID:
            return committed.changes
        return _with_privileges(record.path if dry_run else self._backend.base, committed.changes)

    def rebase(self, *, force: bool = False, dry_run: bool = False) -> list[str]:
        """Forks the branch anew from its parent's present state and keeps its changes on top.

        Makes a stale branch live again. A live one shows what was committed to its parent since
        the fork. Nothing is copied; open files of the branch become stale.

        Args:
            force: Keep the branch's version of paths that were changed in the parent, too.
            dry_run: Find these paths, and change nothing.

        Returns:
            The conflicting paths of which the branch's version was kept; empty without `force`.

        Raises:
            ConflictError: Both sides changed the `paths` that it lists. The branch is unchanged.
            CommitError: Something runs in the branch, it has live children, files open for
                writing, or a stale parent, or the file system refused. The branch is unchanged.
            RecoveryError: The branch was rebased, and the store must be recovered.
        """
        record = self._opened()
        with nullcontext() if dry_run else held_alone(self._backend, record, "rebased"):
            return self._backend.rebase(record, force=force, dry_run=dry_run)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keeps every process from committing or rebasing the branch for the length of the `with`.

        Everything that runs commands in branches does this: the patterns, `branching run` and
        `shell`, the MCP server, agents. A commit is refused meanwhile, also with `force`, and
        names the process. Where the store belongs to another user it has no effect.
        """
        with held(self._backend, self._opened()):
            yield

    def abort(self) -> None:
        """Drops the branch with all it holds, and its children. Its parent is untouched.

        On a branch that has ended already this does nothing. AbortError if it cannot be dropped.
        """
        record = self._opened()
        if self._ended is None:
            self._backend.abort(record)
            self._end("aborted")

    def release(self) -> None:
        """Has the branch stay open also if this process is killed."""
        if self._record is not None and self.is_leased:
            self.is_leased = False
            end_lease(self._backend, self._record)

    def _end(self, how: str) -> None:
        self._ended = how
        self.release()

    def diff(self, *, count_lines: bool = False) -> list[Change]:
        """Lists what the branch changed against its parent, by path."""
        return self._backend.diff(self._opened(), count_lines=count_lines)

    def patch(self, file: IO[bytes]) -> int:
        """Writes what the branch changed to an open file, as a patch that `git apply` takes.

        Returns how many changes a patch cannot say (owners, empty directories, special files);
        comment lines in it name them. BranchError if it cannot be written to its end.
        """
        file.flush()
        return self._backend.patch(self._opened(), file.fileno())

    def export(self, file: IO[bytes]) -> None:
        """Writes all that the branch changed to an open file, as an OCI layer (a tar archive).

        `Workspace.load` makes a branch of it, here or elsewhere. BranchError if it cannot be
        written to its end; the file then holds no whole archive.
        """
        file.flush()
        self._backend.export(self._opened(), file.fileno())

    def inspect(self) -> BranchRecord:
        """Asks what the file system knows of the branch now: its state, its disk use.

        BranchNotFoundError when it is gone.
        """
        record = self._opened()
        for known in self._backend.branches():
            if known.id == record.id:
                return known
        raise BranchNotFoundError(f"branch {self._name!r} is gone", branch=self._name)

    def is_stale(self) -> bool:
        """Asks whether a sibling was committed first, or the branch is gone altogether."""
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
            with defer_sigint():
                self._record = self._backend.create(
                    self._name, self._parent_id, disk_limit=self._disk_limit
                )
                if self.is_leased:
                    lease(self._backend, self._record)
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
            return  # who was forked in the `with` leaves it too: the branch is our parent's
        # A file of a DaxFS branch tells of the lost race before the commit does.
        was_stale = _is_estale(error) and self._backend.fstype == "daxfs" and self.is_stale()
        with defer_sigint():
            if kind is None and self._on_success == "commit" and not self._is_rest:
                self._commit_at_exit()
            elif kind is not None and self._on_error == "abort":
                try:
                    self.abort()
                except BranchingError as failure:
                    # The exception under way is what the caller must see; this one goes along.
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
            if self.is_open:  # it was made before the cancellation could be heard
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
            # A lost race leaves nothing to be rescued. After any other conflict the work can
            # still be committed (`force`, `skip`), so the branch stays.
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
    """Raises ValueError unless `name` can be a branch's (the rule of branchfs/docs/control.md)."""
    if not isinstance(name, str):
        raise TypeError(f"a branch name must be a string, not {type(name).__name__}")
    if reason := _fault(name):
        raise ValueError(f"{name!r} cannot be the name of a branch: {reason}")


def _with_privileges(top: Path, changes: list[Change]) -> list[Change]:
    """Adds what privileges the changed files below `top` give to those who execute them."""
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
        return ()  # changed meanwhile, or not ours to look at
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
        return "it is the root branch's"
    try:
        encoded = os.fsencode(name)
        encoded.decode()
    except UnicodeError:
        return "it is not UTF-8"
    if len(encoded) > NAME_BYTES_MAX:
        return f"it is longer than {NAME_BYTES_MAX} bytes"
    return None
