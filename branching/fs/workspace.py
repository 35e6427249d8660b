"""A workspace: a mount of a branching file system, found from any path inside it, or created.

A workspace that is opened from a path inside a branch represents that branch: branches forked from
it are nested in the branch and commit into it. A candidate that itself runs a race therefore gets
the winner into its own branch. A commit past it into main would make the candidate stale.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING

from branching._linux.mountinfo import Mount, mounts_around, mounts_named, read_mounts
from branching._signals import defer_sigint
from branching._threads import run_in_thread
from branching.errors import BranchNotFoundError, MountError, add_note
from branching.fs.backend import (
    MAIN_ID,
    Backend,
    BranchRecord,
    Change,
    CommitRecord,
    Driver,
    Policy,
    Reversal,
)
from branching.fs.branch import Branch, OnError, OnSuccess, check_name, load_branch
from branching.fs.branch_leases import (
    agents_directory,
    drop_leased,
    in_agents_directory,
    remove_agents_directory,
)
from branching.fs.branchfs import BranchFS, Introduction, answered
from branching.fs.in_use import sweep
from branching.fs.store_files import open_file

if TYPE_CHECKING:
    from branching.fs.automount import MountLease

_KEPT_MARK = "mount"
"""The file that names a mount that is to stay without a user; see `automount`."""


class Workspace:
    """An open workspace: the mount that contains `path`.

    Opening it also drops the branches that killed programs left behind; `dropped` has their names.

    Args:
        path: A path in the mount, at any depth. A path inside a branch opens that branch.

    Raises:
        MountError: No mount contains `path`, or its daemon does not respond.
        BranchNotFoundError: `path` is inside a branch that no longer exists.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._held: MountLease | None = None
        self._backend = _backend(Path(path))
        sweep(self._backend)
        self.dropped = [record.name for record in drop_leased(self)]
        """Names of orphaned branches that were dropped when this object was created."""
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

        The base is this directory, never one above it. If the directory is inside a mount, that
        mount's workspace is opened instead. Branches are stored in `.branching` in the directory.
        Several processes may open one directory; the last one to `close` unmounts it.

        Args:
            directory: The directory, or a path in a mount.
            policy: The mount's policy, as for `mount`. Default: BRANCHFS_POLICY, or first-winner.
            driver: The mount's driver, as for `mount`. Default: BRANCHFS_DRIVER, or auto.

        Returns:
            The workspace.

        Raises:
            MountError: The directory does not exist, the program `branchfs` or /dev/fuse is
                missing, or the directory cannot be mounted or is mounted with another policy or
                driver.
        """
        try:
            return open_mounted(directory, policy=policy, driver=driver, kind=cls)
        except NoMount:
            return mount_directory(directory, policy=policy, driver=driver, kind=cls)

    def _check_mounted_with(self, policy: Policy | None, driver: Driver | None) -> None:
        """Raises MountError if an existing mount has another policy or driver than requested."""
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
        """Mounts `base` and opens it. `close`, or the end of a `with`, unmounts it.

        Args:
            base: The directory to branch.
            mountpoint: Where to mount it; created if missing. Default: a new directory.
            storage: The store. Default: `.branching` in the base.
            branchfs_bin: The program `branchfs`. Default: BRANCHFS, or the one in PATH.
            policy: The rule for siblings at a commit. first-winner makes them stale. snapshot
                keeps them live; each can be committed if it wrote no path committed since.
                serializable also requires that it read no such path.
            driver: overlay is faster, needs root, and supports only first-winner. fuse supports
                all policies. auto uses overlay where possible.

        Returns:
            The workspace.

        Raises:
            MountError: The base is not a directory or cannot be mounted, or there is no program
                `branchfs`.
        """
        directory = Path(base).resolve()
        if not directory.is_dir():
            raise MountError(f"the base {base} is not a directory", path=str(base))
        from branching._programs import find_branchfs
        from branching.fs.automount import mount

        program = find_branchfs(branchfs_bin)
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
                    agents = agents_directory(workspace._backend)
                    held.kept_mark = agents and agents / _KEPT_MARK
                    workspace._backend.seen_at = workspace._backend.base
                # Also unmounts a workspace that the caller forgot to close.
                weakref.finalize(workspace, held.close)
        except BaseException:
            if held is not None:
                held.close()
            raise
        return workspace

    @property
    def path(self) -> Path:
        """The root of the mount, which shows main; in a branch, the branch's directory."""
        return self._branch.path if self._branch else self._backend.root

    @property
    def root(self) -> Path:
        """The root of the mount, also if the workspace was opened inside a branch."""
        return self._backend.root

    @property
    def seen_at(self) -> Path:
        """The path at which commands in a branch see the workspace.

        It is the mount's root, or the base if the mount is a temporary one of `Workspace.open`.
        """
        return self._backend.seen_at

    @property
    def base(self) -> Path:
        """The directory that the workspace branches from."""
        return self._backend.base

    @property
    def store(self) -> Path | None:
        """The store directory; None if there is none. Commands in branches must not use it."""
        return self._backend.store

    @property
    def policy(self) -> str:
        """The mount's policy, used by commits that do not set another."""
        return self._backend.policy

    @property
    def fstype(self) -> str:
        """The file system that presents the branches: "branchfs", "overlay" or "daxfs"."""
        return self._backend.fstype

    @property
    def driver_reason(self) -> str:
        """The reason for the driver in use: for FUSE, why overlayfs could not be used."""
        return self._backend.driver_reason

    @property
    def owner(self) -> tuple[int, int]:
        """Uid and gid of the base directory's owner, who should own all files."""
        return self._backend.owner

    @property
    def branch_path(self) -> str:
        """Path in the tree of branches: `/main`, or that of the branch it was opened in."""
        return self._branch.branch_path if self._branch else "/main"

    @property
    def concurrent_policy(self) -> Policy | None:
        """The policy for commits that must not make other branches stale.

        None if the mount's own policy does this, or the file system has no other policy.
        """
        has_others = self.fstype != "daxfs"
        return "snapshot" if self.policy == "first-winner" and has_others else None

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
        """Returns a branch of the workspace, to be used in a `with` statement.

        The branch is created when the `with` is entered. A clean exit commits it. An exception
        aborts it and propagates.

        Args:
            name: Name of the branch.
            on_success: None leaves the branch open after a clean exit.
            on_error: None leaves the branch open after an exception.
            disk_limit: Bytes that the branch may add. Writes above it fail with EDQUOT. Default:
                no limit.

        Returns:
            The branch, not yet created.

        Raises:
            TypeError: `name` or `disk_limit` has the wrong type.
            ValueError: `name` cannot be a branch name, or an option has an invalid value.
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
        """Returns the open branch named `name`, to use it further, commit it or abort it.

        Args:
            name: Name of the branch.

        Returns:
            The branch. It stays open until `commit` or `abort`.

        Raises:
            BranchNotFoundError: No open branch has this name.
        """
        for record in self._backend.branches():
            if record.name == name:
                return Branch.of(self._backend, record)
        raise BranchNotFoundError(
            f"no branch {name!r} is open in {self.seen_at}",
            hint="branching ls lists them",
            branch=name,
        )

    def load(
        self, name: str, file: IO[bytes], *, force: bool = False, leased: bool = False
    ) -> Branch:
        """Creates a branch from an archive that `Branch.export` wrote, or from any OCI layer.

        `Branch.export` records what the archive's paths were before the branch changed them, and
        `load` compares that with the workspace. Other layers have no such record: changes made
        since are not detected, and the branch's `has_base_record` is false.

        Args:
            name: Name of the new branch, which is left open.
            file: The archive, open for reading.
            force: Load the archive also over paths that have changed since it was made.
            leased: Let the next program that opens the workspace drop the branch if this process
                is killed.

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
        return load_branch(self._backend, name, parent, file, force=force, leased=leased)

    def branches(self) -> list[BranchRecord]:
        """Returns the open branches at all depths, oldest first."""
        return self._backend.branches()

    def history(self) -> list[CommitRecord]:
        """Returns the commits in the history, oldest first. It holds at most 10, or 1 GiB."""
        return self._backend.history()

    def show(self, commit: int) -> tuple[CommitRecord, list[Change]]:
        """Returns a commit of the history, with the paths that it changed, sorted by path.

        Args:
            commit: Id of the commit, as `history` has it.

        Raises:
            CommitError: There is no such commit in the history.
        """
        return self._backend.commit_changes(commit)

    def newest_pruned(self) -> int:
        """Returns the id of the newest commit that was removed from the history; 0 if none was.

        All later commits are in the history, apart from those that were undone and then replaced.
        """
        return self._backend.newest_pruned()

    def undo(
        self, commit: int | None = None, *, force: bool = False, dry_run: bool = False
    ) -> Reversal:
        """Undoes the last commit to the workspace, all or nothing. Repeat it to undo earlier ones.

        Args:
            commit: Id of the commit, if only this one is to be undone. It must be the last one.
            force: Undo it even if the same paths were changed since, or branches are open. The
                changes since are set aside, and a redo restores them. The branches become stale.
            dry_run: Return the result without changing anything.

        Returns:
            The undone commit and the changes to the workspace.

        Raises:
            ConflictError: The paths that the commit changed were changed again since.
            CommitError: There is nothing to undo, `commit` is not the last one, or branches are
                open.
            RecoveryError: The undo was applied but not completed.
        """
        return self._backend.undo(commit, force=force, dry_run=dry_run)

    def redo(
        self, commit: int | None = None, *, force: bool = False, dry_run: bool = False
    ) -> Reversal:
        """Redoes the last undone commit, all or nothing.

        Args:
            commit: Id of the commit, if only this one is to be redone. It must be the next one.
            force: As for `undo`.
            dry_run: Return the result without changing anything.

        Returns:
            The redone commit and the changes to the workspace.

        Raises:
            ConflictError: The paths concerned were changed since the undo.
            CommitError: There is nothing to redo, `commit` is not the next one, or branches are
                open.
            RecoveryError: The redo was applied but not completed.
        """
        return self._backend.redo(commit, force=force, dry_run=dry_run)

    def prune(self, keep: int = 0) -> tuple[int, int]:
        """Removes all but the newest `keep` commits from the history.

        Args:
            keep: Number of commits that can still be undone afterwards.

        Returns:
            The number of removed commits, and the disk space they used in bytes.
        """
        return self._backend.prune(keep)

    def keep_mounted(self, keep: bool = True) -> None:
        """Decides whether the mount that `open` created stays when its last user closes it.

        Its branches can then be used by path, by programs that do not use this library. The
        decision holds for all processes, until another one or a reboot.

        Args:
            keep: False unmounts it with its last user again, as is the default.

        Raises:
            MountError: The mount was made by hand, or the decision cannot be written to the store.
                The mount stays as long as it would have stayed.
        """
        from branching.fs.automount import is_temporary

        agents = agents_directory(self._backend)
        if agents is None or not is_temporary(self.root):
            raise MountError(
                f"the mount {self.root} was made by hand, and stays until it is unmounted",
                hint=f"unmount it: branchfs unmount {self.root}",
                path=str(self.root),
            )
        mark = agents / _KEPT_MARK
        try:
            if keep:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                descriptor = in_agents_directory(
                    self._backend, lambda _, here: open_file(mark.name, flags, directory=here)
                )
                with os.fdopen(descriptor, "wb") as file:
                    if os.geteuid() == 0:
                        os.fchown(file.fileno(), *self.owner)
                    file.write(os.fsencode(self.root))
            else:
                mark.unlink(missing_ok=True)
                remove_agents_directory(agents)
        except OSError as error:
            raise MountError(f"{mark} cannot be changed: {error}", path=str(mark)) from error

    def is_shared(self) -> bool:
        """Returns whether another process uses the mount that `open` created or found."""
        return self._held is not None and self._held.is_shared()

    def close(self) -> None:
        """Closes the connections to the file system.

        Open branches stay. The mount stays too, unless `open` or `mount` created it and
        `keep_mounted` was not called.

        Raises:
            MountError: A mount that `open` or `mount` created cannot be unmounted.
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


class NoMount(MountError):
    """No mount that can be branched contains the path."""


def open_mounted(
    directory: str | os.PathLike[str],
    *,
    policy: Policy | None = None,
    driver: Driver | None = None,
    kind: type[Workspace] = Workspace,
) -> Workspace:
    """Opens the workspace of the mount around `directory`, as `Workspace.open`.

    Raises:
        NoMount: There is no mount around it.
        MountError: As `Workspace.open`.
    """
    workspace = kind(directory)
    return _checked(workspace, directory, policy, driver)


def mount_directory(
    directory: str | os.PathLike[str],
    *,
    policy: Policy | None = None,
    driver: Driver | None = None,
    while_mounting: Callable[[], None] | None = None,
    kind: type[Workspace] = Workspace,
) -> Workspace:
    """Mounts a directory that is in no mount, and opens it, as `Workspace.open`.

    `while_mounting` is called once `branchfs mount` was started. A command loads its modules
    meanwhile.
    """
    from branching.fs.automount import acquire_mount

    _check_directory(Path(directory))
    place = Path(directory).resolve()
    workspace = kind._of(
        lambda: acquire_mount(place, policy=policy, driver=driver, while_mounting=while_mounting)
    )
    return _checked(workspace, directory, policy, driver)


def _checked(
    workspace: Workspace,
    directory: str | os.PathLike[str],
    policy: Policy | None,
    driver: Driver | None,
) -> Workspace:
    """Returns a workspace that was just opened, or closes it if it is not what was asked for."""
    try:
        _check_directory(Path(directory))
        workspace._check_mounted_with(policy, driver)
    except MountError:
        workspace.close()
        raise
    return workspace


def _check_directory(place: Path) -> None:
    try:
        is_directory = place.is_dir()
    except OSError:  # a mount whose daemon is gone: opening it says so, with what to do
        return
    if not is_directory:
        raise MountError(f"{place} is not a directory", path=str(place))


def _backend(path: Path) -> Backend:
    """Finds the mount around a path, and asks its daemon, in one thread."""
    mounts = read_mounts()
    named = next((mount for mount in mounts_named(path, mounts) if _is_served(mount)), None)
    around: Mount | None
    introduction = None
    if named is None:
        around = _served_around(path, mounts)
    else:

        def ask() -> tuple[Mount | None, Introduction | None]:
            found = _served_around(path, mounts)
            if found is None or not BranchFS.serves(found):
                return found, None
            return found, BranchFS.introduce(found) if found == named else None

        around, introduction = answered(named.directory, ask)
    if around is None:
        raise NoMount(
            f"{path} is not inside a mount that can be branched",
            hint="mount its directory first: branchfs mount --base DIR MOUNTPOINT",
            path=str(path),
        )
    if BranchFS.serves(around):
        return BranchFS(around, introduction)
    from branching.fs.daxfs import DaxFS

    return DaxFS(around)


def find_mount(path: Path) -> Mount | None:
    """Returns the innermost mount that contains `path` and that a backend supports.

    Args:
        path: Any path.

    Returns:
        The mount; None if there is none.

    Raises:
        MountError: The path cannot be resolved because a daemon does not respond.
    """
    mounts = read_mounts()
    for mount in mounts_named(path, mounts):
        if _is_served(mount):
            answered(mount.directory, lambda: os.path.realpath(path))
            break
    return _served_around(path, mounts)


def _served_around(path: Path, mounts: Sequence[Mount]) -> Mount | None:
    return next((mount for mount in mounts_around(path, mounts) if _is_served(mount)), None)


def _is_served(mount: Mount) -> bool:
    if mount.fstype != "daxfs":  # the module is loaded only where there is one
        return BranchFS.serves(mount)
    from branching.fs.daxfs import DaxFS

    return DaxFS.serves(mount)


def _branch_around(path: Path, backend: Backend) -> BranchRecord | None:
    """Returns the branch that contains `path`: `/@outer/@inner/file` is in `inner`."""
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
    raise BranchNotFoundError(f"{path} is not in an open branch", branch=name, path=str(path))
