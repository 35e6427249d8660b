"""DaxFS as a backend: a kernel module whose branches are mounts of their own.

    /mnt/daxfs                              main, read-only; the user has mounted it
    /run/branching/daxfs/KEY/               the store: KEY is a hash of main's path
    /run/branching/daxfs/KEY/ID/NAME        a branch; its mount has main's path as its source

The mount table is the list of branches: nothing else is kept, so nothing can disagree with it. The
time of its creation in nanoseconds is a branch's id.

The module has one level of branches for us: it commits a nested branch together with all above it,
into main. A commit is a reconfiguration of the branch's mount, which becomes read-only in the same
call: the kernel refuses that while a file is open for writing, and a descriptor that outlived the
commit would write into main. Mounts of main that were there before a commit go on showing the old
state, so main is mounted again beneath its mount, and the old one is detached. What main shows then
is compared with what the branch showed: the module loses some kinds of changes without an error.

Two calls at once may take the same entry of the module's table, which is shared memory that it does
not lock: `_locked` serializes them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from branching._linux import flock, syscalls
from branching._linux.mountinfo import Mount, read_mounts
from branching.errors import (
    AbortError,
    BranchError,
    BranchingError,
    BranchNotFoundError,
    CommitError,
    ConflictError,
    MountError,
    RecoveryError,
)
from branching.fs.backend import (
    MAIN_ID,
    BranchRecord,
    Change,
    CommitRecord,
    Committed,
    Policy,
    Reversal,
    lease_line,
)
from branching.fs.store_files import open_directory

STORES = Path("/run/branching/daxfs")
NAME_BYTES_MAX = 31
"""The module's own limit (DAXFS_BRANCH_NAME_MAX)."""
BUSY_SECONDS_MAX = 5.0
"""How long a commit waits for files that are open for writing: a process that was killed may have
them open for a moment."""
_BUSY_POLL_SECONDS = 0.005
_IOC_GET_DMABUF = 0x4401
"""Asks any directory of a mount for a descriptor of the memory that holds the file system."""
_FLAGS = {
    "nosuid": syscalls.MS_NOSUID,
    "nodev": syscalls.MS_NODEV,
    "noexec": syscalls.MS_NOEXEC,
}
"""Flags of main's mount that its branches inherit."""
_PATHS_NAMED_MAX = 5
Entry = tuple[int, int] | None
"""Type and size of a file or a directory; None of one that cannot be read."""
_MISSING: Entry = (0, 0)
_NO_NESTED = "no nested branches, which setups, limits on all candidates and deeper levels need"
_NO_CHANGES = "no list of changes"
_NO_PART = "no commit of a part"
_HINT = "mount the directory with BranchFS instead: branchfs mount --base DIR MOUNTPOINT"


class DaxFS:
    """One DaxFS, known by the mount of its main branch."""

    def __init__(self, mount: Mount) -> None:
        branch = _branch_of(mount)
        self.root = mount.directory if branch == "/main" else Path(mount.source)
        if self._main() is None:
            raise MountError(
                f"{mount.point} cannot be opened as a workspace: it shows {branch}, and the mount "
                "of its main branch is not known",
                hint="open the mount of the main branch",
                path=str(mount.point),
            )
        self.seen_at = self.base = self.root
        self.policy = "first-winner"
        self.fstype = "daxfs"
        self.driver_reason = "it is mounted there"
        found = self.root.stat()
        self.owner = found.st_uid, found.st_gid
        from hashlib import sha256  # takes longer to load than all else here

        key = sha256(os.fsencode(self.root)).hexdigest()[:16]
        self.store: Path = STORES / key

    @staticmethod
    def serves(mount: Mount) -> bool:
        """Returns whether a DaxFS mount shows a branch, unlike that of an image alone."""
        return mount.fstype == "daxfs" and _branch_of(mount) is not None

    def check_call(self, *, is_nested: bool, is_part: bool, is_compared: bool) -> None:
        for is_needed, missing in (
            (is_nested, _NO_NESTED),
            (is_part, _NO_PART),
            (is_compared, f"{_NO_CHANGES}, which agents, branching mcp and watch need"),
        ):
            if is_needed:
                _refuse(MountError, "nothing was started", missing)

    def create(
        self, name: str, parent: int, *, disk_limit: int | None = None, leases: int | None = None
    ) -> BranchRecord:
        what = f"branch {name!r} was not made"
        if parent != MAIN_ID:
            _refuse(MountError, what, _NO_NESTED, branch=name)
        if disk_limit is not None:
            _refuse(MountError, what, "no limit on disk", branch=name, limit="disk")
        if len(os.fsencode(name)) > NAME_BYTES_MAX:
            raise MountError(
                f"{what}: with DaxFS a name can have {NAME_BYTES_MAX} bytes",
                hint="choose a shorter name",
                branch=name,
            )
        with self._locked(what, name):
            main = self._main()
            if main is None:
                raise MountError(f"{what}: {self.root} is no longer mounted", branch=name)
            if any(record.name == name for record in self.branches()):
                raise BranchError(f"{what}: a branch with that name is open", branch=name)
            created = time.time_ns()
            point = self.store / str(created) / name
            if leases is not None:
                with suppress(OSError):
                    os.write(leases, lease_line(created, name).encode())
            try:
                point.mkdir(parents=True)
                options = {"branch": name, "parent": "main", "source": str(self.root)}
                self._mount(main, point, options)
            except OSError as error:
                _remove_directories(point)
                raise self._not_made(what, name, error) from error
        return self._record(point)

    def commit(
        self,
        branch: BranchRecord,
        *,
        force: bool = False,  # noqa: ARG002  (nothing but a commit changes main)
        skip: bool = False,
        only: Sequence[str] = (),
        exclude: Sequence[str] = (),
        drop_rest: bool = False,  # noqa: ARG002  (there is no rest)
        policy: Policy | None = None,
        rebase: bool = False,
        dry_run: bool = False,
    ) -> Committed:
        what = f"branch {branch.name!r} was not committed"
        for is_asked, missing in (
            (skip or only or exclude, _NO_PART),
            (policy not in (None, self.policy), f"no policy {policy}"),
            (rebase, "no rebase"),
            (dry_run, "no dry run"),
        ):
            if is_asked:
                _refuse(CommitError, what, missing, branch=branch.name)
        with self._locked(what, branch.name, CommitError):
            try:
                before, wanted = _tree(self.root), _tree(branch.path)
                _reconfigure_when_idle(branch.path)
            except OSError as error:
                raise self._not_committed(what, branch, error) from error
            try:
                self._drop(branch)
                self._mount_main_again()
                self._check_committed(branch, before, wanted)
            except OSError as error:
                raise RecoveryError(
                    f"branch {branch.name!r} was committed, but {self.root} could not be mounted "
                    f"again and shows the state before it: {error.strerror}",
                    hint=f"unmount {self.root} and mount the main branch again",
                    branch=branch.name,
                    path=str(self.root),
                ) from error
        return Committed(changes=[], forgotten=[])

    def rebase(
        self,
        branch: BranchRecord,
        *,
        force: bool = False,  # noqa: ARG002
        dry_run: bool = False,  # noqa: ARG002
    ) -> list[str]:
        what = f"branch {branch.name!r} was not rebased"
        _refuse(CommitError, what, "no rebase", branch=branch.name)

    def detached_mount(self, branch: BranchRecord) -> int | None:  # noqa: ARG002
        return None

    def abort(self, branch: BranchRecord) -> None:
        what = f"branch {branch.name!r} was not dropped"
        with self._locked(what, branch.name, AbortError):
            try:
                self._drop(branch)
            except OSError as error:
                raise AbortError(
                    f"{what}: {error.strerror}", hint=_only_root(error), branch=branch.name
                ) from error

    def diff(self, branch: BranchRecord, *, count_lines: bool = False) -> list[Change]:  # noqa: ARG002
        what = f"branch {branch.name!r} cannot be compared"
        _refuse(BranchError, what, _NO_CHANGES, branch=branch.name)

    def patch(self, branch: BranchRecord, file: int) -> int:  # noqa: ARG002
        what = f"branch {branch.name!r} cannot be written as a patch"
        _refuse(BranchError, what, _NO_CHANGES, branch=branch.name)

    def export(
        self,
        branch: BranchRecord,
        file: int,  # noqa: ARG002
        *,
        whole: bool = False,  # noqa: ARG002
        exclude: Sequence[str] = (),  # noqa: ARG002
    ) -> None:
        what = f"branch {branch.name!r} was not exported"
        _refuse(BranchError, what, "no export", branch=branch.name)

    def load(
        self,
        name: str,
        parent: int,  # noqa: ARG002
        file: int,  # noqa: ARG002
        *,
        force: bool = False,  # noqa: ARG002
        leases: int | None = None,  # noqa: ARG002
    ) -> BranchRecord:
        _refuse(MountError, f"branch {name!r} was not imported", "no import", branch=name)

    def history(self) -> list[CommitRecord]:
        _refuse(MountError, "the history cannot be listed", "no history of commits")

    def newest_pruned(self) -> int:
        _refuse(MountError, "the history cannot be listed", "no history of commits")

    def commit_changes(self, commit: int) -> tuple[CommitRecord, list[Change]]:
        _refuse(CommitError, f"commit {commit} cannot be shown", "no history of commits")

    def undo(
        self,
        commit: int | None = None,  # noqa: ARG002
        *,
        force: bool = False,  # noqa: ARG002
        dry_run: bool = False,  # noqa: ARG002
    ) -> Reversal:
        _refuse(CommitError, "nothing was undone", "no history of commits")

    def redo(
        self,
        commit: int | None = None,  # noqa: ARG002
        *,
        force: bool = False,  # noqa: ARG002
        dry_run: bool = False,  # noqa: ARG002
    ) -> Reversal:
        _refuse(CommitError, "nothing was redone", "no history of commits")

    def prune(self, keep: int = 0) -> tuple[int, int]:  # noqa: ARG002
        _refuse(MountError, "nothing was pruned", "no history of commits")

    def branches(self) -> list[BranchRecord]:
        records = [
            self._record(mount.directory)
            for mount in read_mounts()
            # One of main below the store is a committed branch that could not be unmounted.
            if self.serves(mount)
            and mount.directory.parent.parent == self.store
            and _branch_of(mount) != "/main"
        ]
        return sorted(records, key=lambda record: record.id)

    def close(self) -> None:
        """There is nothing to give back."""

    def _main(self) -> Mount | None:
        for mount in read_mounts():
            is_main = self.serves(mount) and _branch_of(mount) == "/main"
            if is_main and mount.directory == self.root:
                return mount
        return None

    def _record(self, point: Path) -> BranchRecord:
        created, name = int(point.parent.name), point.name
        return BranchRecord(
            id=created,
            name=name,
            parent=MAIN_ID,
            path=point,
            branch_path=f"/main/{name}",
            state="stale" if _is_stale(point) else "live",
            frozen=False,
            created=created / 1e9,
        )

    @contextmanager
    def _locked(
        self, what: str, branch: str, failure: type[BranchingError] = MountError
    ) -> Iterator[None]:
        """Keeps other processes from making and committing branches for the length of the `with`.

        The lock is the store's directory itself: it is never removed.
        """
        try:
            self.store.mkdir(parents=True, exist_ok=True)
            lock = open_directory(self.store)
        except OSError as error:
            raise failure(
                f"{what}: {self.store}: {error.strerror}", hint=_only_root(error), branch=branch
            ) from error
        try:
            flock.lock(lock)
            yield
        finally:
            os.close(lock)

    def _mount(
        self, main: Mount, point: Path, options: dict[str, str], *, is_beneath: bool = False
    ) -> None:
        flags = sum(_FLAGS.get(flag, 0) for flag in main.options)
        if "branch" not in options and main.is_read_only:
            flags |= syscalls.MS_RDONLY
        with _memory_of(main) as memory:
            made = syscalls.new_mount("daxfs", {**memory, **options}, flags)
        try:
            syscalls.attach_mount(made, str(point), is_beneath=is_beneath)
        finally:
            os.close(made)

    def _mount_main_again(self) -> None:
        main = self._main()
        if main is None:
            return  # it was unmounted: the commit is visible after the next mount
        self._mount(main, self.root, {"source": main.source}, is_beneath=True)
        syscalls.unmount(str(self.root))

    def _check_committed(
        self, branch: BranchRecord, before: dict[str, Entry], wanted: dict[str, Entry]
    ) -> None:
        """Raises RecoveryError where main is not what the branch was, or has new entries that
        cannot be read: the module loses some kinds of changes, and reports none of it."""
        found = _tree(self.root)
        differing = {
            path
            for path in {*wanted, *found}
            if wanted.get(path, _MISSING) != found.get(path, _MISSING)
        }
        broken = {
            path for path, entry in found.items() if entry is None and before.get(path, _MISSING)
        }
        paths = sorted(differing | broken)
        if paths:
            named = ", ".join(map(repr, paths[:_PATHS_NAMED_MAX]))
            more = f" and {len(paths) - _PATHS_NAMED_MAX} more" if paths[_PATHS_NAMED_MAX:] else ""
            raise RecoveryError(
                f"branch {branch.name!r} was committed, but DaxFS lost changes: {self.root} "
                f"differs from the branch at {named}{more}",
                hint="write these files again in a new branch, each as a new file",
                branch=branch.name,
                paths=tuple(paths),
            )

    def _drop(self, branch: BranchRecord) -> None:
        """Unmounts a branch: the module drops what was not committed."""
        with suppress(FileNotFoundError):
            if any(mount.directory == branch.path for mount in read_mounts()):
                syscalls.unmount(str(branch.path))
            _remove_directories(branch.path)

    def _not_made(self, what: str, name: str, error: OSError) -> BranchingError:
        if error.errno == errno.EEXIST:
            return BranchError(
                f"{what}: the name is taken, perhaps by a dropped branch with files still open",
                hint="choose another name",
                branch=name,
            )
        hint = _only_root(error)
        if error.errno == errno.ENOSPC:
            hint = "an image has room for a limited number of branches over its whole life: make "
            hint += "a new image with mkdaxfs"
        return MountError(f"{what}: {error.strerror}", hint=hint, branch=name)

    def _not_committed(self, what: str, branch: BranchRecord, error: OSError) -> BranchingError:
        if error.errno == errno.ESTALE:
            return ConflictError(
                f"{what}: a sibling was committed first",
                hint="abort it, and try again in a new branch",
                branch=branch.name,
            )
        if error.errno == errno.ENOENT:
            return BranchNotFoundError(f"{what}: it is no longer open", branch=branch.name)
        if error.errno == errno.EBUSY:
            return CommitError(
                f"{what}: files in it are still open for writing. Nothing was changed",
                hint="close them, or end the processes that have them open",
                branch=branch.name,
            )
        if error.errno == errno.ENOSPC:
            return CommitError(
                f"{what}: its changes do not fit into main's log (1 MiB for all commits). "
                "Main is unchanged, but other branches are stale",
                hint="make a new image with mkdaxfs",
                branch=branch.name,
            )
        return CommitError(f"{what}: {error.strerror}", hint=_only_root(error), branch=branch.name)


def _branch_of(mount: Mount) -> str | None:
    """Returns the branch that a mount shows: `/main`, `/main/NAME`; None for a plain image."""
    return _options_of(mount).get("branch")


def _options_of(mount: Mount) -> dict[str, str]:
    """Returns the file system's options. A name is cut at its first comma: they are not escaped."""
    return dict(each.split("=", 1) for each in mount.super_options.split(",") if "=" in each)


@contextmanager
def _memory_of(main: Mount) -> Iterator[dict[str, str | int]]:
    """Returns the options that name the memory which holds the file system."""
    options = _options_of(main)
    if "phys" in options:
        yield {"phys": options["phys"], "size": options["size"]}
        return
    root = os.open(main.point, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        memory = fcntl.ioctl(root, _IOC_GET_DMABUF)
    finally:
        os.close(root)
    try:
        yield {"dmabuf": memory}
    finally:
        os.close(memory)


def _tree(top: Path) -> dict[str, Entry]:
    """Lists all below a directory. OSError if it cannot be listed."""
    found: dict[str, Entry] = {}
    waiting = [top]
    while waiting:
        for path in waiting.pop().iterdir():
            entry: Entry = None
            with suppress(FileNotFoundError):  # an entry that an earlier commit has broken
                facts = path.lstat()
                kind = stat.S_IFMT(facts.st_mode)
                entry = kind, 0 if kind == stat.S_IFDIR else facts.st_size
                if kind == stat.S_IFDIR:
                    waiting.append(path)
            found[str(path.relative_to(top))] = entry
    return found


def _is_stale(point: Path) -> bool:
    try:
        with os.scandir(point) as entries:
            next(entries, None)
    except OSError as error:
        return error.errno == errno.ESTALE
    return False


def _reconfigure_when_idle(point: Path) -> None:
    """Commits the branch that is mounted at `point`, as soon as no file is open for writing."""
    deadline = time.monotonic() + BUSY_SECONDS_MAX
    while True:
        try:
            syscalls.reconfigure(str(point), ("ro", "commit"))
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() >= deadline:
                raise
        else:
            return
        time.sleep(_BUSY_POLL_SECONDS)


def _remove_directories(point: Path) -> None:
    with suppress(FileNotFoundError):
        point.rmdir()
    with suppress(OSError):  # not empty: not created by this program
        point.parent.rmdir()


def _refuse(
    failure: type[BranchingError],
    what: str,
    missing: str,
    *,
    branch: str | None = None,
    limit: str | None = None,
) -> NoReturn:
    raise failure(f"{what}: DaxFS has {missing}", hint=_HINT, branch=branch, limit=limit)


def _only_root(error: OSError) -> str | None:
    if error.errno in (errno.EPERM, errno.EACCES):
        return "DaxFS branches are mounts: only root can make, commit and drop them"
    return None
