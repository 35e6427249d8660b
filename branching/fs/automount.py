"""Mounts that are made when somebody needs them and go when nobody does.

`acquire_mount(base)` finds the mount of a directory or makes it, in a new directory of its own:

    /tmp/branching-mount-k3x9q2     made by us, so ours to unmount
    ~/project/.branching            the store beneath it, when branches are kept

Several processes may work on one directory at once. The file system lets only one mount use a
store, so they share it, and the last to leave unmounts. Who is there is told by locks: each holds
a shared lock on the mount's root, and who can make it exclusive is alone. A kernel lock goes with
its process, however that dies. A mount that was made by hand (`branchfs mount`) is used, and stays.

Mounting and unmounting take turns by a lock on the base directory, or the last user could unmount
what another one has just found. Somebody who mounts by hand takes no turn: so after locking the
root is asked once more whether it is the mount's, and if it is not, all begins anew.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from branching._linux.mountinfo import read_mounts
from branching._signals import defer_sigint
from branching._standard_streams import open_closed
from branching.errors import MountError, add_note
from branching.fs.branchfs import BranchFS, NoAnswer, read_control_path
from branching.fs.flock import is_locked

PROGRAM = "branchfs"
PROGRAM_VARIABLE = "BRANCHFS"
"""Names the program where it is not on PATH."""
PREFIX = "branching-mount-"
"""Of the directories we mount at, and so the sign that a mount is to be unmounted."""
STORE = ".branching"
MOUNT_SECONDS_MAX = 60
"""A mount takes milliseconds, unless a commit that a crash cut off is first rolled forward."""
SETTLE_SECONDS_MAX = 10
"""How long we wait for a mount that somebody makes by hand at the same moment."""
BUSY_SECONDS_MAX = 2
"""How long a mount may be busy although nobody is seen to use it."""
_POLL_SECONDS = 0.01
IN_USE = "in use by another mount"
"""So the program says that another daemon has locked the store."""
_GONE = (errno.ENOTCONN, errno.ENODATA, errno.EOPNOTSUPP, errno.ENOENT)
"""What the root answers when the mount was taken away: a dead one, or the bare directory."""


class MountLease:
    """A mount in use by us."""

    def __init__(self, point: Path, base: Path, program: Path | None, lease: int) -> None:
        self.point = point
        self._base = base
        self._program = program
        """Unmounts it, if it is to go with its last user."""
        self._lease: int | None = lease
        self._pid = os.getpid()

    @property
    def is_made_up(self) -> bool:
        """Its place has a name of our making, which is another one the next time."""
        return self.point.name.startswith(PREFIX)

    def close(self) -> None:
        """Unmounts it if nobody else uses it. MountError if it cannot be unmounted."""
        if self._pid != os.getpid():
            return  # forked from the user: the mount is our parent's
        if self._lease is None:
            return
        with defer_sigint(), self._turn():
            is_last = self._program is not None and _is_alone(self._lease)
            os.close(self._lease)
            self._lease = None
            if self._program is not None and is_last:
                self._unmount(self._program)

    def _turn(self) -> AbstractContextManager[None]:
        # A directory that was moved away or removed: nobody finds its mount by it any more.
        return _turn(self._base) if self._base.is_dir() else nullcontext()

    def _unmount(self, program: Path) -> None:
        deadline = time.monotonic() + BUSY_SECONDS_MAX
        while True:
            try:
                return _unmount(self.point, program)
            except MountError:
                # The kernel lets go of a file some time after it was closed. Who fails for good
                # can try again later: the mount is still there, and still ours.
                if time.monotonic() > deadline:
                    self._lease = _lease(self.point)
                    raise
            time.sleep(_POLL_SECONDS)


def find_program(name: str | os.PathLike[str] | None = None) -> Path:
    """Returns the branchfs program. MountError where there is none."""
    wanted = os.fspath(name or os.environ.get(PROGRAM_VARIABLE) or PROGRAM)
    found = shutil.which(wanted)
    if found is None:
        raise MountError(
            f"there is no program {wanted!r}, which mounts directories",
            hint="cargo install --path branchfs; or work in a container: branching-docker",
            path=wanted,
        )
    return Path(found)


def base_around(directory: Path) -> Path:
    """Returns the workspace to use for work in `directory` where none is named: the nearest
    directory at or above it that keeps branches, else `directory` itself.

    The search ends at the home directory and at the border of the file system. A store counts only
    if it can be read, and belongs to the owner of the directory that it is in: anybody may leave
    one in /tmp.
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
        return None  # the user has none


def acquire_mount(
    base: Path, *, policy: str | None = None, driver: str | None = None
) -> MountLease:
    """Finds or makes a mount of `base`. MountError if neither can be done.

    `policy` and `driver` are of a mount that is made; without them BRANCHFS_POLICY and
    BRANCHFS_DRIVER count, else first-winner and auto.
    """
    program = find_program()
    deadline = time.monotonic() + SETTLE_SECONDS_MAX
    while True:
        with _turn(base):
            for point in _mounts_of(base):
                lease = _lease(point)
                if lease is not None:
                    is_ours = point.name.startswith(PREFIX)
                    return MountLease(point, base, program if is_ours else None, lease)
            try:
                return _mounted(base, program, policy=policy, driver=driver)
            except MountError as error:
                # Another process mounts it by hand, and we shall see the mount in a moment. Or a
                # mount has just ended, and its daemon is about to release the store.
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
    """Mounts `base`, in a directory of our own unless `point` is given.

    Raises MountError, and then there is no mount.
    """
    deadline = time.monotonic() + SETTLE_SECONDS_MAX
    while True:
        with _turn(base):
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
                # The daemon of a mount that has ended serves copies of it in other mount
                # namespaces for a moment.
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
) -> MountLease:
    made = _make_point(base) if point is None else None
    options = {"--policy": policy, "--driver": driver, "--store": store and os.fspath(store)}
    words = [word for name, value in options.items() if value for word in (name, value)]
    try:
        _run(program, "mount", "--base", os.fspath(base), *words, os.fspath(made or point or ""))
    except BaseException:
        if made is not None:
            made.rmdir()
        raise
    try:
        lease = _lease(made or point or Path())
        if lease is None:
            raise MountError(f"{base} was mounted, and the mount was gone at once", path=str(base))
    except BaseException as error:
        try:
            _unmount(made or point or Path(), program)
        except (MountError, OSError) as failure:
            add_note(error, f"and its mount stays: {failure}")
        raise
    return MountLease(made or point or Path(), base, program, lease)


def _unmount(point: Path, program: Path) -> None:
    """Unmounts, and removes the directory if we made it."""
    if _is_dead(point):
        _detach(point)
    else:
        _run(program, "unmount", os.fspath(point))
    if point.name.startswith(PREFIX):
        point.rmdir()


def _is_dead(point: Path) -> bool:
    """Tells whether the daemon behind the mount has died: then there is nobody to ask."""
    try:
        point.stat()
    except OSError as error:
        return error.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    return False


def _detach(point: Path) -> None:
    """Takes a dead mount away. What was committed is safe, and kept branches are in the store."""
    words = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-u", "-z"]
    _run(Path(words[0]), *words[1:], os.fspath(point))


def _run(program: Path, *words: str) -> None:
    try:
        # A session of its own: Ctrl-C is for us, and must not break off a mount half-way.
        done = subprocess.run(
            [program, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=MOUNT_SECONDS_MAX,
            start_new_session=True,
            check=False,
        )
    except OSError as error:
        raise MountError(
            f"{program} cannot be run: {error.strerror}", path=os.fspath(program)
        ) from error
    except subprocess.TimeoutExpired as error:
        raise MountError(
            f"{program} {words[0]} has not ended after {MOUNT_SECONDS_MAX} seconds",
            path=words[-1],
        ) from error
    if done.returncode != 0:
        said = done.stderr.strip().removeprefix("branchfs: ").removeprefix("Error: ")
        raise MountError(f"{words[0]} failed: {said}", path=words[-1])


def _make_point(base: Path) -> Path:
    """Makes a directory to mount at, which the owner of the base can reach."""
    places = [tempfile.gettempdir(), "/var/tmp"]
    if os.geteuid() != 0 and (runtime := os.environ.get("XDG_RUNTIME_DIR")):
        places.insert(0, runtime)
    for place in map(Path, places):
        # Inside the base the mount would show itself.
        if os.access(place, os.W_OK) and not place.resolve().is_relative_to(base):
            return Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    raise MountError(
        f"there is no directory outside of {base} to mount at",
        hint="point TMPDIR to one, or mount by hand: branchfs mount --base DIR MOUNTPOINT",
        path=str(base),
    )


def _mounts_of(base: Path) -> Iterator[Path]:
    """Yields where `base` is mounted already, as far as we may see.

    The mount table names the base of each mount. So no daemon is asked but that of `base` itself: a
    daemon that does not answer hinders work in its own directory alone.
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
            continue  # an older version, whose mounts do not name their base
        except (MountError, OSError):
            continue  # a dead mount, or another user's
        if is_same:
            yield mount.directory


def _is_same(source: Path, base: Path, points: list[Path]) -> bool:
    if source == base:
        return True
    # To look at a directory inside another mount is to ask that mount's daemon.
    if any(source.is_relative_to(point) for point in points):
        return False
    try:
        return source.samefile(base)
    except OSError:
        return False


def _lease(point: Path) -> int | None:
    """Locks the mount's root for sharing. None if it is a mount no more."""
    open_closed()
    try:
        lease = os.open(point, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise MountError(f"{point} cannot be opened: {error.strerror}", path=str(point)) from error
    try:
        fcntl.flock(lease, fcntl.LOCK_SH)
        read_control_path(lease)
    except OSError as error:
        os.close(lease)
        if error.errno in _GONE:
            return None
        raise MountError(f"{point} cannot be used: {error.strerror}", path=str(point)) from error
    return lease


@contextmanager
def _turn(base: Path) -> Iterator[None]:
    """Waits until nobody else mounts or unmounts `base`."""
    open_closed()
    try:
        lock = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise MountError(f"{base} cannot be opened: {error.strerror}", path=str(base)) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _is_alone(lease: int) -> bool:
    try:
        fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_in_use(base: Path) -> bool:
    """Tells whether some process has locked the base's store."""
    try:
        return is_locked(base.resolve() / STORE / "lock")
    except OSError:
        return False
