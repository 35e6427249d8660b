"""Builds the file system view of a sandboxed process in a new mount namespace. Runs in init.

    all mounts               read-only
    the workspace's path     the branch, writable
    /tmp /var/tmp /dev/shm   empty and private
    /dev                     harmless devices, private terminals
    /run                     only files for name resolution: other programs have sockets here
    /proc                    the sandbox's processes; files that control the machine are masked
    private directories      empty, at every path that leads to them
    sockets of programs      visible, but connections are refused
    hidden files             visible, but cannot be read

The order matters. A path that must stay visible is cloned as a detached mount before its parent is
covered or unmounted, and attached afterwards. A workspace's mount is unmounted in one call with the
mounts of all its branches, so the start time does not depend on the number of branches. The private
directories are covered after that, because a visible directory may contain them. Only the branch's
own part of a private directory is shown in its place. `pivot_root`, the usual method, is refused by
Docker's default system call filter. Processes in the sandbox cannot remove a cover: they lack the
capability and cannot get it (`privileges`).
"""

from __future__ import annotations

import errno
import os
import re
import select
import signal
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from branching._linux import mountinfo, syscalls
from branching.process.sandbox import masked_files, mount_table
from branching.process.sandbox.config import PRIVATE_XATTR, Sandbox

_ORDINARY = syscalls.MS_NOSUID | syscalls.MS_NODEV
_SEALED = _ORDINARY | syscalls.MS_NOEXEC
_REPLACED = ("/tmp", "/var/tmp", "/run")
_OF_RUN = ("systemd/resolve", "resolvconf", "NetworkManager", "connman", "current-system")
"""Below /run: where /etc/resolv.conf may lead; and where one distribution has all its programs."""
_SOCKET_FACTS = re.compile(
    rb"^[^\s:]+: [0-9A-F]{8} [0-9A-F]{8} [0-9A-F]{8} [0-9A-F]{4} [0-9A-F]{2} +\d+", re.MULTILINE
)
"""What comes before the name in /proc/net/unix. A name may contain newlines."""
_STORE_FILES = ("format", "layers")
"""What every store has in it."""
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}
_COVER = "/dev/.covered"
"""An empty file that cannot be opened. It covers sockets and system files."""
_HIDDEN_FILE = "/dev/.hidden-file"
"""Another one, which covers hidden files of the workspace."""
_HIDDEN_DIRECTORY = "/dev/.hidden"
"""An empty directory that cannot be opened. It covers hidden directories of the workspace."""
_EMPTY = "/dev/.empty"
"""An empty directory that takes the place of others. A new file system for each takes longer."""
_PROC_READ_ONLY = ("bus", "fs", "irq", "sys", "sysrq-trigger")
_ANSWER_SECONDS_MAX = 1.0
"""How long another workspace's daemon may take to answer, of which a sandbox asks each."""
_ANSWER_BYTES_MAX = 1 << 16
_REMOVAL_MILLISECONDS_MAX = 1000
"""How long the removal of a directory may take from its mounts to its name."""
_MASKED = (
    "/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys",
    "/proc/latency_stats", "/proc/sched_debug", "/proc/scsi", "/proc/timer_list",
    "/proc/timer_stats", "/sys/firmware", "/sys/kernel/debug", "/sys/kernel/tracing",
    "/sys/kernel/security", "/sys/fs/bpf", "/sys/fs/fuse/connections",
)  # fmt: skip
"""Paths that Docker masks, and paths that only root can read: a branch of root must not."""


class RootFS:
    """The file system view of one sandbox, while it is built."""

    def __init__(
        self,
        sandbox: Sandbox,
        owner: tuple[int, int],
        sockets: Sequence[str],
        *,
        isolate: Callable[[int], None] | None = None,
    ) -> None:
        self._isolate = isolate
        self._sandbox = sandbox
        self._at = str(sandbox.at)
        self._owner = owner
        self._sockets = sockets
        self._table: list[mountinfo.Mount] = []
        self._covers: list[str] = []
        self._shown: list[str] = []
        self._with_mounts: list[str] = []
        """Visible directories of which all mounts in them are visible, too."""
        self.step = ""
        """What is being done, for the message when it fails."""
        self.watch: masked_files.Watch | None = None
        """Looks after the covers of hidden files, if there are any."""

    def build(self) -> list[str]:
        """Builds it and goes to the workspace. Returns the writable places.

        `isolate` is called when only the branch is missing: in a user namespace that it enters, all
        earlier mounts are locked, and the mount of the branch can be replaced. It gets a detached
        mount of the workspace with all its branches.
        """
        self.step = "creating a mount namespace"
        mount_table.take_own()
        view = str(self._sandbox.view)
        is_read_only = _is_mounted_read_only(view)
        with ExitStack() as stack:
            branch = stack.enter_context(_cloned(view))
            whole = -1
            if self._isolate is not None:
                with suppress(OSError):  # with mounts of branches below, which are locked here
                    whole = stack.enter_context(_cloned(str(self._sandbox.mount or view)))
            beside = [
                (stack.enter_context(_cloned(str(source))), str(place))
                for source, place in self._sandbox.beside
            ]
            kept = stack.enter_context(self._kept())
            devices = stack.enter_context(_devices())
            self.step = "unmounting the workspaces"
            covered = list(dict.fromkeys(self._to_cover()))
            self.step = "making the rest read-only"
            mount_table.make_read_only(self._table)
            self.step = "making /dev"
            self._make_devices(devices)
            self.step = "hiding what belongs to others"
            self._replace()
            self._show([each for each in kept if not self._is_private(each[1])])
            self._cover(covered)
            self._show([*(each for each in kept if self._is_private(each[1])), *beside])
            self.step = f"showing the branch at {self._at}"
            self._make_directory(self._at)
            if self._isolate is None:
                _attach(branch, self._at, is_read_only=is_read_only)
                self._hide()
            home = self._make_home()
            self.step = "mounting /proc"
            self._make_proc()
            self.step = "masking system files"
            self._mask()
            for cover in self._covers:
                _seal_cover(cover)
            workspace = self._at
            if self._isolate is not None:
                self.step = "making the user namespace of the session"
                self._isolate(whole)
                self.step = f"showing the branch at {self._at}"
                _attach(branch, self._at, is_read_only=is_read_only)
                self._hide()
                self.watch = None  # the mount helper has one for each branch
                # Landlock identifies directories, not paths: a rule for this branch would not
                # apply to the branches of children. One for the directory above does.
                workspace = os.path.dirname(self._at)
        os.chdir(self._at)
        places = ["/tmp", "/var/tmp", "/dev", "/proc", workspace]
        return [place for place in (*places, *home) if os.path.isdir(place)]

    def _to_cover(self) -> Iterator[str]:
        """Unmounts all workspaces in this table. Lists what must be covered: the private
        directories, the workspaces that could not be unmounted (in a user namespace), and what else
        belongs to other workspaces: their stores and sockets. Their bases are ordinary directories.

        A mount that stayed in this table would keep its branch in use after an abort or an unmount.
        """
        paths = list(map(str, self._sandbox.private))
        # Read-only or not, a socket can be connected to.
        paths += filter(_is_socket_file, self._sockets)
        needed = [self._at, *(str(path) for path, _ in self._sandbox.beside)]
        needed.append(str(self._sandbox.view))
        if self._sandbox.mount is not None:
            # Before the table is read: the lines of many branches would take milliseconds.
            paths += self._unmount(str(self._sandbox.mount))
        table = mountinfo.read_table()
        for mount in table:
            if mount_table.is_branchfs(mount):
                is_needed = any(mount_table.is_beneath(path, mount.point) for path in needed)
                told = _private_paths(mount, is_needed=is_needed)[1:]
                paths += filter(_is_store_or_socket, told)
        workspaces = mount_table.outermost(filter(mount_table.has_branches, table))
        for mount in workspaces:
            paths += self._unmount(mount.point)
        self._table = mountinfo.read_table() if workspaces else table
        paths += [mount.point for mount in self._table if _is_socket(mount)]
        left = mount_table.outermost(filter(mount_table.has_branches, self._table))
        paths += [mount.point for mount in left]
        for path in paths:
            for place in mount_table.places_of(path, self._table):
                if not mount_table.is_beneath(place, self._at):  # there the branch will lie over it
                    yield place

    def _unmount(self, point: str) -> list[str]:
        """Unmounts a workspace in this table, with its branches. Returns what must be covered then:
        a cover has room for the directories that lead to the workspace's path.
        """
        with suppress(OSError):  # not allowed, or out of reach: it stays in the table
            syscalls.unmount(point)
            if self._at.startswith(f"{point}/"):
                return [point]
        return []

    @contextmanager
    def _kept(self) -> Iterator[list[tuple[int, str]]]:
        """Clones what lies below a directory that is covered and must be seen all the same."""
        kept: list[tuple[int, str]] = []
        ids: list[tuple[str, int]] = []
        wanted = {*(f"/run/{name}" for name in _OF_RUN), *self._sandbox.keep}
        try:
            for path in sorted(wanted):
                is_replaced = any(path.startswith(f"{cover}/") for cover in _REPLACED)
                if not is_replaced and not self._is_private(path):
                    continue
                if mount_table.is_beneath(path, self._at):
                    continue
                try:
                    descriptor = self._open_kept(path)
                except OSError:
                    continue  # gone meanwhile, or the branch has not got it
                # A clone shows what lies below it in the same mount.
                mount = mount_table.id_of(descriptor)
                if any(id_ == mount and mount_table.is_beneath(path, place) for place, id_ in ids):
                    os.close(descriptor)
                    continue
                ids.append((path, mount))
                kept.append((self._clone_of_kept(descriptor, path), path))
            yield kept
        finally:
            for descriptor, _ in kept:
                os.close(descriptor)

    def _clone_of_kept(self, descriptor: int, path: str) -> int:
        """Clones a directory. In a user namespace, what is mounted in it comes along."""
        try:
            return syscalls.clone_mount(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL or self._is_private(path):
                raise
            self._with_mounts.append(path)
            return syscalls.clone_mount(descriptor, is_recursive=True)
        finally:
            os.close(descriptor)

    def _is_private(self, path: str) -> bool:
        return any(mount_table.is_beneath(path, str(private)) for private in self._sandbox.private)

    def _open_kept(self, path: str) -> int:
        """Opens a path that must stay visible; in a private directory, the branch's part of it.

        Symbolic links are not followed. The resolved path has none; a link created since could
        lead to any directory.
        """
        for private in map(str, self._sandbox.private):
            if mount_table.is_beneath(path, private):
                return _open_exactly(str(self._sandbox.view), path[len(private) :])
        return _open_exactly("/", path)

    def _replace(self) -> None:
        for place in _REPLACED:
            if os.path.isdir(place) and not os.path.islink(place):
                mode = "mode=755" if place == "/run" else "mode=1777"
                syscalls.mount("tmpfs", place, "tmpfs", _ORDINARY, mode)
        self._covers.append("/run")

    def _cover(self, places: Iterable[str]) -> None:
        sockets = frozenset(self._sockets)
        for place in places:
            # It lay below a directory that was replaced, or others have removed it meanwhile.
            with suppress(FileNotFoundError, NotADirectoryError):
                if _is_out_of_reach(place):
                    continue
                if place in sockets:
                    self._cover_socket(place)
                elif os.path.isdir(place):
                    syscalls.mount("tmpfs", place, "tmpfs", _SEALED, "mode=755,size=64k")
                    self._covers.append(place)
                else:
                    _cover_file(place)

    def _cover_socket(self, place: str) -> None:
        """Covers a file if it is a socket. The list of sockets may have forged or stale paths."""
        descriptor = os.open(place, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                _cover_file(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)

    def _show(self, kept: list[tuple[int, str]]) -> None:
        for descriptor, path in kept:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                self._make_directory(path)
            else:
                self._make_directory(os.path.dirname(path))
                _touch(path)
            _attach(descriptor, path, is_read_only=True)
            self._shown.append(path)
            if path in self._with_mounts:
                table = mountinfo.read_table()
                mount_table.make_read_only(
                    [mount for mount in table if mount.point.startswith(f"{path}/")]
                )

    def _make_directory(self, path: str) -> None:
        """Creates a directory, if it does not exist, to mount something on.

        What is shown below a replaced directory is read-only, and without the mounts in it. If one
        of these leads to the path, its empty mount point is covered, so that it has room.
        """
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            points = [mount.point for mount in self._table if self._leads_to(mount.point, path)]
            if error.errno != errno.EROFS or not points:
                raise
            point = min(points, key=len)
            syscalls.mount("tmpfs", point, "tmpfs", _SEALED, "mode=755,size=64k")
            self._covers.append(point)
            os.makedirs(path, exist_ok=True)

    def _leads_to(self, point: str, path: str) -> bool:
        """Returns whether a mount point around the path is below a directory that is shown."""
        return mount_table.is_beneath(path, point) and any(
            point.startswith(f"{place}/") for place in self._shown
        )

    def _make_devices(self, devices: dict[str, int]) -> None:
        syscalls.mount("tmpfs", "/dev", "tmpfs", syscalls.MS_NOSUID, "mode=755,size=64k")
        for name, descriptor in devices.items():
            _touch(f"/dev/{name}")
            syscalls.mount(f"/proc/self/fd/{descriptor}", f"/dev/{name}", None, syscalls.MS_BIND)
        for name, target in _DEVICE_LINKS.items():
            os.symlink(target, f"/dev/{name}")
        for name in ("pts", "shm"):
            os.mkdir(f"/dev/{name}")
        options = "ptmxmode=0666,mode=620"
        syscalls.mount(
            "devpts", "/dev/pts", "devpts", syscalls.MS_NOSUID | syscalls.MS_NOEXEC, options
        )
        syscalls.mount("tmpfs", "/dev/shm", "tmpfs", _ORDINARY, "mode=1777")
        for cover in (_COVER, _HIDDEN_FILE):
            _touch(cover)
            os.chmod(cover, 0)
        os.mkdir(_EMPTY, 0o755)
        os.mkdir(_HIDDEN_DIRECTORY, 0)
        _seal("/dev")

    def _make_home(self) -> list[str]:
        """Makes the home, where the place for it is our own and nothing else has it."""
        home = self._sandbox.home
        if home is None or not any(str(home).startswith(f"{top}/") for top in _REPLACED[:2]):
            return []
        if os.path.lexists(home):
            return []
        self.step = f"making the home {home}"
        home.mkdir(mode=0o700, parents=True)
        os.chown(home, *self._owner)
        return [str(home)]

    def _hide(self) -> None:
        if self._sandbox.hide:
            self.step = "hiding files of the workspace"
            hide(self._at, self._sandbox.hide)
            self.watch = masked_files.Watch(is_cover)

    def _make_proc(self) -> None:
        syscalls.mount("proc", "/proc", "proc", _SEALED)
        for name in _PROC_READ_ONLY:
            place = f"/proc/{name}"
            if os.path.exists(place):
                syscalls.mount(place, place, None, syscalls.MS_BIND | syscalls.MS_REC)
                flags = syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY | _SEALED
                syscalls.mount(None, place, None, flags)

    def _mask(self) -> None:
        for place in _MASKED:
            if os.path.isdir(place):
                syscalls.mount(_EMPTY, place, None, syscalls.MS_BIND)
            elif os.path.exists(place):
                _cover_file(place)


def hide(at: str, globs: Sequence[str]) -> None:
    """Covers the files of the workspace that match, and what matching links lead to.

    What a link leads to may be outside of the branch, and be covered since an earlier branch.
    """
    for place in masked_files.find(at, globs):
        cover = _HIDDEN_DIRECTORY if os.path.isdir(place) else _HIDDEN_FILE
        if not os.path.samefile(place, cover):
            syscalls.mount(cover, place, None, syscalls.MS_BIND)


def is_cover(mount: mountinfo.Mount) -> bool:
    """Whether a mount covers something of the workspace that is hidden.

    The covers of sockets go when those who have bound the sockets remove them.
    """
    return mount.fstype == "tmpfs" and f"/dev{mount.root}" in (_HIDDEN_FILE, _HIDDEN_DIRECTORY)


def _cover_file(place: str) -> None:
    """Covers a file with an empty file that cannot be opened, on our read-only /dev."""
    syscalls.mount(_COVER, place, None, syscalls.MS_BIND)


def bound_sockets() -> list[str]:
    """Lists the names in the file system of this network's sockets, but for those in /run.

    Whoever binds a socket chooses its name: it need not be that of a socket.
    """
    replaced: tuple[str, ...] = ("/run/",)
    if os.path.islink("/var/run"):  # to /run
        replaced += ("/var/run/",)
    with open("/proc/net/unix", "rb") as table:
        names = [name[1:-1] for name in _SOCKET_FACTS.split(table.read())[1:]]
    paths = dict.fromkeys(os.fsdecode(name) for name in names if name.startswith(b"/"))
    return [path for path in paths if not path.startswith(replaced)]


def _is_socket_file(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return False  # gone, or out of reach


def _is_store_or_socket(path: str) -> bool:
    """Returns whether a path is what another workspace's mount calls private. Any user's file
    system may call itself a BranchFS, and name any path.
    """
    if all(os.path.lexists(f"{path}/{name}") for name in _STORE_FILES):
        return True
    return _is_socket_file(path)


def _open_exactly(top: str, path: str) -> int:
    """Opens a path below `top` without following symbolic links (ELOOP, ENOTDIR)."""
    descriptor = os.open(top, os.O_PATH | os.O_CLOEXEC)
    for name in filter(None, path.split("/")):
        above = descriptor
        try:
            descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
        finally:
            os.close(above)
    if stat.S_ISLNK(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    return descriptor


def _is_socket(mount: mountinfo.Mount) -> bool:
    """Whether a single file was mounted and it is a socket: a container is given one so."""
    try:
        return mount.root != "/" and stat.S_ISSOCK(os.lstat(mount.point).st_mode)
    except OSError:
        return False


def _private_paths(mount: mountinfo.Mount, *, is_needed: bool) -> list[str]:
    """Returns the private paths of a BranchFS mount: base, store and socket.

    The daemon of another workspace may not answer, and a process that waits for it can only be
    killed. So a separate process asks it. After `_ANSWER_SECONDS_MAX`, the default path of the
    store is assumed.
    """
    if not mount_table.answers(mount):
        return []
    if is_needed:
        found = _asked(mount.point)
    else:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        asking = os.fork()
        if asking == 0:
            try:
                os.write(writing, _asked(mount.point))
            finally:
                os._exit(0)
        os.close(writing)
        answer = select.poll()
        answer.register(reading, select.POLLIN)
        if answer.poll(_ANSWER_SECONDS_MAX * 1000):
            found = os.read(reading, _ANSWER_BYTES_MAX)
        else:
            os.kill(asking, signal.SIGKILL)
            found = os.fsencode(f"{mount.source}\0{mount.source}/.branching")
        os.close(reading)
        os.waitpid(asking, 0)
    return [os.fsdecode(path) for path in found.split(b"\0") if path]


def _asked(point: str) -> bytes:
    try:
        return os.getxattr(point, PRIVATE_XATTR)
    except OSError:
        return b""  # another user's, or a dead one: nothing in the sandbox can reach it


@contextmanager
def _cloned(path: str) -> Iterator[int]:
    clone = syscalls.clone_mount_at(path)
    try:
        yield clone
    finally:
        os.close(clone)


@contextmanager
def _devices() -> Iterator[dict[str, int]]:
    opened = {}
    try:
        for name in _DEVICES:
            opened[name] = os.open(f"/dev/{name}", os.O_PATH | os.O_CLOEXEC)
        yield opened
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


def _attach(clone: int, target: str, *, is_read_only: bool) -> None:
    syscalls.attach_mount(clone, target)
    flags = os.statvfs(target).f_flag & syscalls.KEPT_FLAGS | syscalls.MS_REMOUNT | syscalls.MS_BIND
    flags |= _ORDINARY | (syscalls.MS_RDONLY if is_read_only else 0)
    syscalls.mount(None, target, None, flags)


def _is_mounted_read_only(path: str) -> bool:
    """Returns whether the mount around `path` is read-only, other than its file system alone."""
    if not os.statvfs(path).f_flag & os.ST_RDONLY:
        return False
    return mount_table.around(path, mountinfo.read_table()).is_read_only


def _is_out_of_reach(place: str) -> bool:
    """Returns whether the path is inaccessible to us, and so to the sandbox, which has our user.

    A FUSE mount whose daemon has died (ENOTCONN) is: its connection cannot be made again.
    """
    try:
        os.lstat(place)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.ENOTCONN):
            raise
        return True
    return False


def _seal_cover(place: str) -> None:
    """Makes a cover read-only, unless the directory below it is removed meanwhile.

    rmdir(2) takes along what others have mounted on a directory, a moment before its name is gone:
    in between, no mount is at the path (EINVAL).
    """
    for _ in range(_REMOVAL_MILLISECONDS_MAX):
        try:
            return _seal(place)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        time.sleep(0.001)
    return _seal(place)


def _seal(place: str) -> None:
    flags = syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY | syscalls.MS_NOSUID
    if place != "/dev":
        flags |= syscalls.MS_NODEV
    flags |= os.statvfs(place).f_flag & syscalls.KEPT_FLAGS
    syscalls.mount(None, place, None, flags)


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o444))
