"""Mounts a directory on demand, and unmounts it after its last use.

`acquire_mount(base)` returns the existing mount of a directory, or mounts it at a new one:

    /tmp/branching-mount-k3x9q2     a temporary mount point, unmounted after the last use
    ~/project/.branching            the store; it stays while there are kept branches

Several processes may use one directory concurrently. Only one mount can use a store, so they share
it, and the last process unmounts it. Each process holds a shared lock on the root of the mount. The
process that can turn its lock into an exclusive one is the last. The kernel releases the locks of a
process when it dies. A mount that a user made by `branchfs mount` is shared, and never unmounted.

An exclusive lock on the base directory serializes mounting and unmounting. Otherwise the last user
could unmount a mount that another process has just found. `branchfs mount` does not take this lock.
So after locking the root, the process checks that the root still belongs to the mount, and starts
over if it does not.

`branching create` keeps a mount without a user. Its mount point is in a file of the store:

    STORE/agents/mount              ignored if the store is mounted elsewhere
"""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from branching._linux import flock
from branching._linux.mountinfo import read_mounts
from branching._programs import find_branchfs
from branching._signals import defer_sigint
from branching._standard_streams import open_closed
from branching.errors import MountError, add_note
from branching.fs.branchfs import BranchFS, NoAnswer, read_control_path
from branching.fs.store_files import is_locked, read

PREFIX = "branching-mount-"
"""Name prefix of temporary mount points, which are unmounted after the last use."""
STORE = ".branching"
MOUNT_SECONDS_MAX = 60
"""A mount takes milliseconds, unless an interrupted commit has to be recovered first."""
SETTLE_SECONDS_MAX = 10
"""How long to wait for another process that is mounting or unmounting the directory."""
BUSY_SECONDS_MAX = 2
"""How long to retry an unmount that fails with EBUSY while no process holds a lock."""
_POLL_SECONDS = 0.01
IN_USE = "in use by another mount"
"""Part of branchfs's error message when another daemon has locked the store."""
_GONE = (errno.ENOTCONN, errno.ENODATA, errno.EOPNOTSUPP, errno.ENOENT)
"""Errors of the root after an unmount: its daemon has exited, or it is an ordinary directory."""


class MountLease:
    """A mount that this process uses."""

    def __init__(self, point: Path, base: Path, program: Path | None, lease: int) -> None:
        self.point = point
        self._base = base
        self._program = program
        """The branchfs program if the mount is temporary, else None."""
        self._lease: int | None = lease
        self._pid = os.getpid()
        self.kept_mark: Path | None = None
        """The file in the store that keeps the mount without a user, if it names this mount."""

    @property
    def is_made_up(self) -> bool:
        """Whether the mount point is temporary; it has another name the next time."""
        return is_temporary(self.point)

    def is_shared(self) -> bool:
        """Returns whether another process uses the mount."""
        assert self._lease is not None, "it is in use by us"
        with self._mount_lock():
            is_alone = _is_alone(self._lease)
            flock.lock(self._lease, is_shared=True)
        return not is_alone

    def close(self) -> None:
        """Unmounts a temporary mount if this is its last user. Idempotent.

        Raises:
            MountError: The mount could not be unmounted. It stays, and `close` can be called again.
        """
        if self._pid != os.getpid():
            return  # in a forked process: the lease is the parent's
        if self._lease is None:
            return
        with defer_sigint(), self._mount_lock():
            is_last = self._program is not None and _is_alone(self._lease)
            os.close(self._lease)
            self._lease = None
            if self._program is not None and is_last and not self._is_kept():
                self._unmount(self._program)

    def _is_kept(self) -> bool:
        try:
            return self.kept_mark is not None and read(self.kept_mark) == os.fsencode(self.point)
        except OSError:
            return False  # it does not exist, or is not a regular file

    def _mount_lock(self) -> AbstractContextManager[None]:
        # If the directory was moved or removed, no process can find its mount by it any more.
        return _mount_lock(self._base) if self._base.is_dir() else nullcontext()

    def _unmount(self, program: Path) -> None:
        deadline = time.monotonic() + BUSY_SECONDS_MAX
        while True:
            try:
                return _unmount(self.point, program)
            except MountError:
                # The kernel releases a file shortly after it was closed. After the deadline the
                # lease is taken again, so that the caller can retry.
                if time.monotonic() > deadline:
                    self._lease = _lease(self.point)
                    raise
            time.sleep(_POLL_SECONDS)


def is_temporary(point: Path) -> bool:
    """Returns whether a mount point is temporary: named by this module."""
    return point.name.startswith(PREFIX)


def base_around(directory: Path) -> Path:
    """Returns the workspace of `directory`: the nearest parent with a store, else `directory`.

    The search ends at the home directory and at a file-system border. A store is ignored if it
    cannot be read, or if its owner is not the owner of the directory that contains it: any user can
    create one in /tmp.
    """
    place = directory.resolve()
    device = place.stat().st_dev
    for candidate in (place, *place.parents):
        try:
            around = candidate.stat()
            if around.st_dev != device:
                break
            mark = candidate / STORE / "format"
            is_readable = mark.is_file() and os.access(mark, os.R_OK)
            if is_readable and (candidate / STORE).lstat().st_uid == around.st_uid:
                return candidate
        except OSError:
            pass
        if candidate == _home():
            break
    return place


def _home() -> Path | None:
    try:
        return Path.home().resolve()
    except RuntimeError:
        return None  # the user has no home directory


def acquire_mount(
    base: Path,
    *,
    policy: str | None = None,
    driver: str | None = None,
    while_mounting: Callable[[], None] | None = None,
) -> MountLease:
    """Returns the existing mount of `base`, or mounts it.

    Args:
        base: The directory to branch.
        policy: Conflict policy of a new mount. Default: $BRANCHFS_POLICY, else first-winner.
        driver: Driver of a new mount. Default: $BRANCHFS_DRIVER, else auto.
        while_mounting: Called once `branchfs mount` was started, while it works.

    Raises:
        MountError: The directory could not be mounted.
    """
    program = find_branchfs()
    deadline = time.monotonic() + SETTLE_SECONDS_MAX
    while True:
        with _mount_lock(base):
            for point in _mounts_of(base):
                lease = _lease(point)
                if lease is not None:
                    return MountLease(point, base, program if is_temporary(point) else None, lease)
            try:
                return _mounted(
                    base, program, policy=policy, driver=driver, while_mounting=while_mounting
                )
            except MountError as error:
                # Another process is mounting it with `branchfs mount`, or the daemon of a previous
                # mount has not released the store yet.
                is_in_use = IN_USE in error.message or _is_in_use(base)
                if time.monotonic() > deadline or not is_in_use:
                    raise
        time.sleep(_POLL_SECONDS)


def mount(
    base: Path,
    *,
    program: Path,
    point: Path | None = None,
    store: Path | None = None,
    policy: str = "first-winner",
    driver: str = "auto",
) -> MountLease:
    """Mounts `base` at `point`, or at a temporary mount point.

    Raises:
        MountError: The directory could not be mounted. There is no mount left.
    """
    deadline = time.monotonic() + SETTLE_SECONDS_MAX
    while True:
        with _mount_lock(base):
            try:
                return _mounted(
                    base,
                    program,
                    point=point,
                    store=store,
                    policy=policy,
                    driver=None if driver == "auto" else driver,  # auto: as BRANCHFS_DRIVER says
                )
            except MountError as error:
                # After an unmount the daemon exits when the copies of the mount in other mount
                # namespaces are gone, too.
                is_ending = IN_USE in error.message and next(_mounts_of(base), None) is None
                if time.monotonic() > deadline or not is_ending:
                    raise
        time.sleep(_POLL_SECONDS)


def _mounted(
    base: Path,
    program: Path,
    *,
    point: Path | None = None,
    store: Path | None = None,
    policy: str | None = None,
    driver: str | None = None,
    while_mounting: Callable[[], None] | None = None,
) -> MountLease:
    made = _make_point(base) if point is None else None
    options = {"--policy": policy, "--driver": driver, "--store": store and os.fspath(store)}
    words = [word for name, value in options.items() if value for word in (name, value)]
    try:
        at = os.fspath(made or point or "")
        _run(program, "mount", "--base", os.fspath(base), *words, at, meanwhile=while_mounting)
    except BaseException:
        if made is not None:
            made.rmdir()
        raise
    try:
        lease = _lease(made or point or Path())
        if lease is None:
            raise MountError(
                f"{base} was mounted, but the mount disappeared immediately", path=str(base)
            )
    except BaseException as error:
        try:
            _unmount(made or point or Path(), program)
        except (MountError, OSError) as failure:
            add_note(error, f"and its mount stays: {failure}")
        raise
    return MountLease(made or point or Path(), base, program, lease)


def _unmount(point: Path, program: Path) -> None:
    """Unmounts, and removes a temporary mount point."""
    if _is_dead(point):
        _detach(point)
    else:
        _run(program, "unmount", os.fspath(point))
    if is_temporary(point):
        point.rmdir()


def _is_dead(point: Path) -> bool:
    """Returns whether the daemon of the mount has died."""
    try:
        point.stat()
    except OSError as error:
        return error.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    return False


def _detach(point: Path) -> None:
    """Unmounts a mount whose daemon has died. Commits and kept branches are in the store."""
    words = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-u", "-z"]
    _run(Path(words[0]), *words[1:], os.fspath(point))


def _run(program: Path, *words: str, meanwhile: Callable[[], None] | None = None) -> None:
    """Runs a program to its end, and calls `meanwhile` once it was started."""
    try:
        with subprocess.Popen(
            [program, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # so that Ctrl-C does not interrupt it
        ) as process:
            try:
                if meanwhile is not None:
                    meanwhile()
                _, said = process.communicate(timeout=MOUNT_SECONDS_MAX)
            except BaseException:
                process.kill()
                raise
    except OSError as error:
        raise MountError(
            f"{program} cannot be run: {error.strerror}", path=os.fspath(program)
        ) from error
    except subprocess.TimeoutExpired as error:
        raise MountError(
            f"{program} {words[0]} has not ended after {MOUNT_SECONDS_MAX} seconds",
            path=words[-1],
        ) from error
    if process.returncode != 0:
        said = said.strip().removeprefix("branchfs: ").removeprefix("Error: ")
        raise MountError(f"{words[0]} failed: {said}", path=words[-1])


def _make_point(base: Path) -> Path:
    """Creates a temporary mount point that the owner of the base can reach.

    As tempfile.mkdtemp, but outside of the base. That would add 10 % to the time that `branching
    run` takes to load modules.
    """
    temporary = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    places = [*filter(None, temporary), "/tmp", "/var/tmp"]
    if os.geteuid() != 0 and (runtime := os.environ.get("XDG_RUNTIME_DIR")):
        places.insert(0, runtime)
    for place in map(Path, places):
        # Inside the base, the mount would contain itself.
        if os.access(place, os.W_OK) and not place.resolve().is_relative_to(base):
            point = place.absolute() / f"{PREFIX}{os.urandom(8).hex()}"
            point.mkdir(0o700)
            return point
    raise MountError(
        f"there is no directory outside of {base} to mount at",
        hint="point TMPDIR to one, or mount by hand: branchfs mount --base DIR MOUNTPOINT",
        path=str(base),
    )


def _mounts_of(base: Path) -> Iterator[Path]:
    """Yields the mount points of `base` that this user can access.

    The mount table names the base of each mount, so only daemons of `base` are queried. A daemon
    that does not answer blocks work in its own directory only.
    """
    mounts = [mount for mount in read_mounts() if BranchFS.serves(mount)]
    points = [mount.directory for mount in mounts]
    for mount in mounts:
        is_named = mount.source.startswith("/")
        if is_named and not _is_same(Path(mount.source), base, points):
            continue
        try:
            backend = BranchFS(mount)
            is_same = backend.base == base or backend.base.samefile(base)
            backend.close()
        except NoAnswer:
            if is_named:
                raise
            continue  # a mount of an older version, which does not name its base
        except (MountError, OSError):
            continue  # a dead mount, or another user's
        if is_same:
            yield mount.directory


def _is_same(source: Path, base: Path, points: list[Path]) -> bool:
    if source == base:
        return True
    # A stat inside another mount would query that mount's daemon.
    if any(source.is_relative_to(point) for point in points):
        return False
    try:
        return source.samefile(base)
    except OSError:
        return False


def _lease(point: Path) -> int | None:
    """Takes a shared lock on the root of the mount. Returns None if it is no longer a mount."""
    open_closed()
    try:
        lease = os.open(point, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise MountError(f"{point} cannot be opened: {error.strerror}", path=str(point)) from error
    try:
        flock.lock(lease, is_shared=True)
        read_control_path(lease)
    except OSError as error:
        os.close(lease)
        if error.errno in _GONE:
            return None
        raise MountError(f"{point} cannot be used: {error.strerror}", path=str(point)) from error
    return lease


@contextmanager
def _mount_lock(base: Path) -> Iterator[None]:
    """Holds the lock that serializes mounting and unmounting `base`."""
    open_closed()
    try:
        lock = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise MountError(f"{base} cannot be opened: {error.strerror}", path=str(base)) from error
    try:
        flock.lock(lock)
        yield
    finally:
        os.close(lock)


def _is_alone(lease: int) -> bool:
    try:
        return flock.try_lock(lease)
    except OSError:
        return False  # its daemon is gone


def _is_in_use(base: Path) -> bool:
    """Returns whether a process has locked the base's store."""
    try:
        return is_locked(base.resolve() / STORE / "lock")
    except OSError:
        return False
