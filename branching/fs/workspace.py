"""A workspace: a mount of a branching file system, found from any path inside it, or made.

Opened from a path inside a branch it stands for that branch: what is forked from it is nested in
the branch and commits into it. So a candidate that races others itself gets the winner into its
own branch, not past it into main, where it would make itself stale.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING

from branching._linux.mountinfo import Mount, mounts_around, mounts_named
from branching._signals import defer_sigint
from branching._threads import run_in_thread
from branching.errors import BranchNotFoundError, MountError, add_note
from branching.fs.backend import (
    MAIN_ID,
    Backend,
    BranchRecord,
    CommitRecord,
    Driver,
    Policy,
    Reversal,
)
from branching.fs.branch import Branch, OnError, OnSuccess, check_name
from branching.fs.branch_leases import drop_leased
from branching.fs.branchfs import BranchFS, answered
from branching.fs.daxfs import DaxFS
from branching.fs.in_use import sweep

if TYPE_CHECKING:
    from branching.fs.automount import MountLease

_BACKENDS = (BranchFS, DaxFS)
"""Every file system we can branch, in the order they are asked."""


class Workspace:
    """Opens the mount that `path` lies in; `path` may be deep inside it, or inside a branch.

    Raises MountError where there is no such mount, or nobody answers for it, and
    BranchNotFoundError when `path` lies in a branch that is gone.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._held: MountLease | None = None
        self._backend = _open(Path(path))
        sweep(self._backend)
        self.dropped = [record.name for record in drop_leased(self)]
        """Branches that programs which were killed had left, and that were dropped just now."""
        self._branch = _branch_around(Path(path), self._backend)

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        policy: Policy | None = None,
        driver: Driver | None = None,
    ) -> Workspace:
        """Opens `directory` as a workspace, and mounts it until `close` if it is not mounted.

        The workspace is this directory, never one above it, unless it lies inside a mount: then
        it is that mount's workspace. Branches are kept in `.branching` in the directory. Several
        processes may open one directory; the last one to `close` unmounts it.

        Args:
            directory: the directory, or a path in a mount.
            policy: the mount's policy, as for `mount`. Default: BRANCHFS_POLICY, or first-winner.
            driver: the mount's driver, as for `mount`. Default: BRANCHFS_DRIVER, or auto.

        Raises:
            MountError: there is no such directory, no program `branchfs` or no /dev/fuse, or the
                directory cannot be mounted, or it is mounted with another policy or driver.
        """
        place = Path(directory)
        try:
            is_directory = place.is_dir()
        except OSError:  # a mount whose daemon is gone: opening it says so, with what to do
            is_directory = True
        if not is_directory:
            raise MountError(f"{place} is not a directory", path=str(place))
        if find_mount(place) is not None:
            workspace = cls(place)
        else:
            from branching.fs.automount import acquire_mount

            workspace = cls._of(
                lambda: acquire_mount(place.resolve(), policy=policy, driver=driver)
            )
        try:
            workspace._check_mounted_with(policy, driver)
        except MountError:
            workspace.close()
            raise
        return workspace

    def _check_mounted_with(self, policy: Policy | None, driver: Driver | None) -> None:
        """Raises MountError if the mount, which others have made, is another than was asked for."""
        has = "fuse" if self.fstype == "branchfs" else self.fstype
        wanted = []
        if policy is not None and policy != self.policy:
            wanted.append(f"policy {policy} (it has {self.policy})")
        if driver not in (None, "auto", has):
            wanted.append(f"driver {driver} (it has {has})")
        if wanted:
            raise MountError(
                f"{self.seen_at} is mounted already, not with the {' and the '.join(wanted)}",
                hint="leave the option out"
                if has == "daxfs"
                else "wait for the other commands on it, or unmount it: branchfs unmount "
                f"{self.root}; or leave the option out",
                path=str(self.root),
            )

    @classmethod
    def mount(
        cls,
        base: str | os.PathLike[str],
        *,
        mountpoint: str | os.PathLike[str] | None = None,
        storage: str | os.PathLike[str] | None = None,
        branchfs_bin: str | os.PathLike[str] | None = None,
        policy: Policy = "first-winner",
        driver: Driver = "auto",
    ) -> Workspace:
        """Mounts `base` and opens it; `close`, or the end of a `with`, unmounts it.

        It is mounted at `mountpoint`, by default a new directory; branches are kept in `storage`,
        by default `.branching` in the base. `policy` says what a commit means for the siblings of
        the branch: they are stale (first-winner), or live on and can be committed if they wrote
        (snapshot), or wrote and read (serializable), nothing that was committed since. `driver`
        says what presents the branches: overlay is the faster, serves first-winner alone and takes
        root; fuse serves all; auto takes overlay where it can.
        Raises MountError when it cannot be mounted.
        """
        directory = Path(base).resolve()
        if not directory.is_dir():
            raise MountError(f"the base {base} is not a directory", path=str(base))
        from branching.fs.automount import find_program, mount

        program = find_program(branchfs_bin)
        point = None if mountpoint is None else Path(mountpoint)
        if point is not None:
            point.mkdir(parents=True, exist_ok=True)
        store = None if storage is None else Path(storage)
        return cls._of(
            lambda: mount(
                directory, program=program, point=point, store=store, policy=policy, driver=driver
            )
        )

    @classmethod
    def _of(cls, hold: Callable[[], MountLease]) -> Workspace:
        held = None
        try:
            with defer_sigint():
                held = hold()
                workspace = cls(held.point)
                workspace._held = held
                if held.is_made_up:
                    workspace._backend.seen_at = workspace._backend.base
                # Who forgets to close it must not leave a mount behind.
                weakref.finalize(workspace, held.close)
        except BaseException:
            if held is not None:
                held.close()
            raise
        return workspace

    @property
    def path(self) -> Path:
        """The root of the mount, which shows main; the branch's directory if opened in one."""
        return self._branch.path if self._branch else self._backend.root

    @property
    def root(self) -> Path:
        """The root of the mount in any case."""
        return self._backend.root

    @property
    def seen_at(self) -> Path:
        """The path at which commands in a branch see the workspace: the mount's root, or the
        directory itself if the mount is a temporary one of `Workspace.open`."""
        return self._backend.seen_at

    @property
    def base(self) -> Path:
        """The directory that the workspace branches from."""
        return self._backend.base

    @property
    def store(self) -> Path | None:
        """Where the branches are kept. Commands in branches have no business there."""
        return self._backend.store

    @property
    def policy(self) -> str:
        """What a commit means for the siblings of the branch, unless it says otherwise."""
        return self._backend.policy

    @property
    def fstype(self) -> str:
        """What presents the branches: "branchfs", "overlay" or "daxfs"."""
        return self._backend.fstype

    @property
    def driver_reason(self) -> str:
        """Why this driver presents the branches: for FUSE, why overlayfs cannot."""
        return self._backend.driver_reason

    @property
    def owner(self) -> tuple[int, int]:
        """Uid and gid of the base directory's owner, to whom all files should belong."""
        return self._backend.owner

    @property
    def branch_path(self) -> str:
        """Its place in the tree of branches: `/main`, or that of the branch it was opened in."""
        return self._branch.branch_path if self._branch else "/main"

    @property
    def concurrent_policy(self) -> Policy | None:
        """The policy with which a command commits so that the branches of others live on; None
        where that is the mount's own, or the file system has no other."""
        has_others = self.fstype != "daxfs"
        return "snapshot" if self.policy == "first-winner" and has_others else None

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
        """Returns a branch of the workspace, which `with` opens and ends.

        A clean exit commits it, an exception aborts it and goes on. With `on_success=None` or
        `on_error=None` it is left open instead. It may add `disk_limit` bytes; above that writing
        in it fails with EDQUOT. Raises ValueError for an impossible name; nothing
        is made before `with`.
        """
        return Branch(
            self._backend,
            name,
            parent_id=self._branch.id if self._branch else MAIN_ID,
            parent_path=self.branch_path,
            on_success=on_success,
            on_error=on_error,
            disk_limit=disk_limit,
        )

    def reopen(self, name: str) -> Branch:
        """Returns the open branch of that name, to go on with it, commit it or abort it.

        Raises BranchNotFoundError when there is none.
        """
        for record in self._backend.branches():
            if record.name == name:
                return Branch.of(self._backend, record)
        raise BranchNotFoundError(
            f"no branch {name!r} is open in {self.seen_at}",
            hint="branching ls lists them",
            branch=name,
        )

    def load(self, name: str, file: IO[bytes], *, force: bool = False) -> Branch:
        """Creates a branch from an archive that `Branch.export` wrote, or from any OCI layer.

        `Branch.export` records what the archive's paths were before the branch changed them, and
        `load` compares that with the workspace. Other layers have no such record: changes made
        since are not detected, and the branch's `has_base_record` is false.

        Args:
            name: Name of the new branch, which is left open.
            file: The archive, open for reading.
            force: Load the archive also over paths that have changed since it was made.

        Returns:
            The branch.

        Raises:
            ConflictError: The `paths` that it lists have changed since the archive was made.
                There is no branch.
            MountError: The archive is damaged, leads out of the workspace, or needs rights that
                the process lacks. There is no branch.
            ValueError: The name is impossible.
        """
        check_name(name)
        parent = self._branch.id if self._branch else MAIN_ID
        record = self._backend.load(name, parent, file.fileno(), force=force)
        return Branch.of(self._backend, record)

    def branches(self) -> list[BranchRecord]:
        """Lists the open branches at all depths, the oldest first."""
        return self._backend.branches()

    def history(self) -> list[CommitRecord]:
        """Lists the commits to the workspace that are kept (10, or 1 GiB), the oldest first."""
        return self._backend.history()

    def undo(self, *, force: bool = False, dry_run: bool = False) -> Reversal:
        """Takes the last commit to the workspace back, all or nothing; again, the one before.

        Raises ConflictError when others have changed what it changed since, and CommitError when
        there is nothing to undo, or branches are open; with `force` their changes are set aside
        (a redo brings them back) and the branches go stale. `dry_run` tells and does nothing.
        """
        return self._backend.undo(force=force, dry_run=dry_run)

    def redo(self, *, force: bool = False, dry_run: bool = False) -> Reversal:
        """Makes the commit that was undone last again. Raises the same."""
        return self._backend.redo(force=force, dry_run=dry_run)

    def prune(self, keep: int = 0) -> tuple[int, int]:
        """Forgets all but the newest `keep` commits; returns how many, and their bytes on disk."""
        return self._backend.prune(keep)

    def close(self) -> None:
        """Closes the connections to the file system. Its branches stay, and so does the mount,
        unless it was made by `open` or `mount`: then MountError if it cannot be unmounted.
        """
        self._backend.close()
        if self._held is not None:
            self._held.close()

    def __enter__(self) -> Workspace:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except MountError as failure:
            if error is None:
                raise
            add_note(error, f"and its mount stays: {failure}")

    async def __aenter__(self) -> Workspace:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await run_in_thread(lambda: self.__exit__(kind, error, traceback))

    def __repr__(self) -> str:
        return f"Workspace({str(self.path)!r})"


def _open(path: Path) -> Backend:
    mount = find_mount(path)
    if mount is not None:
        for backend in _BACKENDS:
            if backend.serves(mount):
                return backend(mount)
    raise MountError(
        f"{path} is not inside a mount that can be branched",
        hint="mount its directory first: branchfs mount --base DIR MOUNTPOINT",
        path=str(path),
    )


def find_mount(path: Path) -> Mount | None:
    """Returns the deepest mount around `path` that some backend serves.

    Raises MountError where the path cannot be looked at, as a daemon does not answer for it.
    """
    for mount in mounts_named(path):
        if any(backend.serves(mount) for backend in _BACKENDS):
            answered(mount.directory, lambda: os.path.realpath(path))
            break
    for mount in mounts_around(path):
        if any(backend.serves(mount) for backend in _BACKENDS):
            return mount
    return None


def _branch_around(path: Path, backend: Backend) -> BranchRecord | None:
    """Returns the branch that `path` lies in: `/@outer/@inner/file` lies in `inner`."""
    place = Path(os.path.realpath(path))
    if not place.is_relative_to(backend.root):  # a branch that is a mount of its own
        return next((each for each in backend.branches() if place.is_relative_to(each.path)), None)
    names = list(
        takewhile(lambda part: part.startswith("@"), place.relative_to(backend.root).parts)
    )
    if not names:
        return None
    name = names[-1].removeprefix("@")
    for branch in backend.branches():
        if branch.name == name:
            return branch
    raise BranchNotFoundError(f"{path} lies in no open branch", branch=name, path=str(path))
