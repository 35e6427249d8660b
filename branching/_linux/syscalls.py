"""The system calls that Python does not offer, each as a function that raises OSError.

The C library is called with the interpreter's lock held (PyDLL): none of these calls waits, and
`clone` must come back in the child with the lock in a state that the child can use. Only `openat2`,
which may wait for a FUSE daemon, releases it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Mapping, Sequence

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
SIGCHLD = 17

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 1 << 18
MNT_DETACH = 0x2
UMOUNT_NOFOLLOW = 0x8
KEPT_FLAGS = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME
KEPT_FLAGS |= os.ST_RELATIME
"""A bind remount replaces all flags. The bits are those of statvfs."""

RESOLVE_NO_LINKS = 0x02 | 0x04
"""RESOLVE_NO_MAGICLINKS and RESOLVE_NO_SYMLINKS."""
RESOLVE_BENEATH = 0x08

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
PR_SET_CHILD_SUBREAPER = 36
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
PR_CAP_AMBIENT_CLEAR_ALL = 4
CAP_SYS_ADMIN = 21

_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_SYSCALLS = {
    "x86_64": {"clone": 56, "capset": 126, "pivot_root": 155, "keyctl": 250, "seccomp": 317},
    "aarch64": {"clone": 220, "capset": 91, "pivot_root": 41, "keyctl": 219, "seccomp": 277},
}
_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _FSPICK = range(428, 434)
_OPENAT2 = 437
_MOUNT_SETATTR = 442
_OPENAT2_TRIES_MAX = 64
"""The kernel gives up (EAGAIN) when something on the way is renamed meanwhile."""
_OPEN_TREE_CLONE = 0x1
_MOVE_MOUNT_F_EMPTY_PATH = 0x4
_MOVE_MOUNT_T_EMPTY_PATH = 0x40
_MOVE_MOUNT_BENEATH = 0x200
_FSOPEN_CLOEXEC = _FSMOUNT_CLOEXEC = _FSPICK_CLOEXEC = 0x1
_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING, _FSCONFIG_SET_FD = 0, 1, 5
_FSCONFIG_CMD_CREATE, _FSCONFIG_CMD_RECONFIGURE = 6, 7
_AT_EMPTY_PATH, _AT_RECURSIVE, _AT_FDCWD = 0x1000, 0x8000, -100
_CAPABILITY_VERSION_3 = 0x20080522
_KEYCTL_JOIN_SESSION_KEYRING = 1
_LANDLOCK_CREATE_RULESET_VERSION = 1
_LANDLOCK_RULE_PATH_BENEATH = 1

_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_waiting_libc = ctypes.CDLL(None, use_errno=True)
_waiting_libc.syscall.restype = ctypes.c_long
_libc.mount.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_ulong, ctypes.c_char_p]
_libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4

MACHINE = os.uname().machine


def is_known_machine() -> bool:
    """Whether the numbers of its system calls are known here."""
    return MACHINE in _SYSCALLS


def clone(flags: int) -> int:
    """Forks into new namespaces; returns 0 in the child. Only for a process with one thread: of
    what the C library does around a fork for other threads nothing is done.
    """
    flags |= SIGCHLD
    null = ctypes.c_void_p(None)
    return _syscall("clone", ctypes.c_ulong(flags), null, null, null, null)


def unshare(flags: int) -> None:
    """Gives this process new namespaces."""
    _check("unshare", _libc.unshare(flags))


def setns(descriptor: int, flags: int) -> None:
    """Enters another process's namespace."""
    _check("setns", _libc.setns(descriptor, flags))


def mount(
    source: str | None, target: str, fstype: str | None = None, flags: int = 0, data: str = ""
) -> None:
    """Mounts, binds or remounts. The error's filename is the target."""
    done = _libc.mount(
        None if source is None else os.fsencode(source),
        os.fsencode(target),
        None if fstype is None else fstype.encode(),
        flags,
        data.encode() if data else None,
    )
    if done != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def clone_mount_at(directory: os.PathLike[str] | str) -> int:
    """Does the same as `clone_mount` for the directory at a path."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return clone_mount(descriptor)
    finally:
        os.close(descriptor)


def clone_mount(descriptor: int, *, is_recursive: bool = False) -> int:
    """Returns a descriptor of a new detached mount of the directory or file of `descriptor`.

    Mounts below it are included only if it is recursive. In a user namespace it must be, if there
    are mounts of its parent (EINVAL): one could see what they hide.
    """
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_EMPTY_PATH
    if is_recursive:
        flags |= _AT_RECURSIVE
    return _numbered(
        "open_tree", _OPEN_TREE, ctypes.c_int(descriptor), ctypes.c_char_p(b""),
        ctypes.c_uint(flags),
    )  # fmt: skip


def new_mount(fstype: str, options: Mapping[str, str | int], flags: int = 0) -> int:
    """Returns a descriptor of a new mount of a file system, which is attached nowhere.

    Of the options a text is a value, and a number is a descriptor. The flags are MS_RDONLY,
    MS_NOSUID, MS_NODEV and MS_NOEXEC; they have the same values here as for `mount`.
    """
    context = _numbered(
        "fsopen", _FSOPEN, ctypes.c_char_p(fstype.encode()), ctypes.c_uint(_FSOPEN_CLOEXEC)
    )
    try:
        for name, value in options.items():
            if isinstance(value, int):
                _fsconfig(context, _FSCONFIG_SET_FD, name, None, value)
            else:
                _fsconfig(context, _FSCONFIG_SET_STRING, name, value)
        _fsconfig(context, _FSCONFIG_CMD_CREATE)
        return _numbered(
            "fsmount", _FSMOUNT, ctypes.c_int(context), ctypes.c_uint(_FSMOUNT_CLOEXEC),
            ctypes.c_uint(flags),
        )  # fmt: skip
    finally:
        os.close(context)


def reconfigure(target: str, options: Sequence[str]) -> None:
    """Gives the file system that is mounted at `target` options without a value, all together."""
    context = _numbered(
        "fspick", _FSPICK, ctypes.c_int(_AT_FDCWD), ctypes.c_char_p(os.fsencode(target)),
        ctypes.c_uint(_FSPICK_CLOEXEC),
    )  # fmt: skip
    try:
        for name in options:
            _fsconfig(context, _FSCONFIG_SET_FLAG, name)
        _fsconfig(context, _FSCONFIG_CMD_RECONFIGURE)
    finally:
        os.close(context)


def _fsconfig(
    context: int, command: int, name: str | None = None, value: str | None = None, number: int = 0
) -> None:
    _numbered(
        "fsconfig", _FSCONFIG, ctypes.c_int(context), ctypes.c_uint(command),
        ctypes.c_char_p(None if name is None else name.encode()),
        ctypes.c_char_p(None if value is None else os.fsencode(value)),
        ctypes.c_int(number),
    )  # fmt: skip


def restrict_mount(descriptor: int, flags: int) -> None:
    """Adds flags to a mount that is attached nowhere: MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC."""
    attributes = struct.pack("=4Q", flags, 0, 0, 0)
    _numbered(
        "mount_setattr", _MOUNT_SETATTR, ctypes.c_int(descriptor), ctypes.c_char_p(b""),
        ctypes.c_uint(_AT_EMPTY_PATH), ctypes.c_char_p(attributes),
        ctypes.c_size_t(len(attributes)),
    )  # fmt: skip


def attach_mount_at(descriptor: int, directory: int) -> None:
    """Attaches a mount that `clone_mount` or `new_mount` returned to an open directory."""
    _numbered(
        "move_mount", _MOVE_MOUNT, ctypes.c_int(descriptor), ctypes.c_char_p(b""),
        ctypes.c_int(directory), ctypes.c_char_p(b""),
        ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_EMPTY_PATH),
    )  # fmt: skip


def attach_mount(descriptor: int, target: str, *, is_beneath: bool = False) -> None:
    """Attaches a mount that `clone_mount` or `new_mount` returned. With `is_beneath` it is hidden
    by the mount at `target` until that is unmounted. The error's filename is the target.
    """
    try:
        _numbered(
            "move_mount", _MOVE_MOUNT, ctypes.c_int(descriptor), ctypes.c_char_p(b""),
            ctypes.c_int(_AT_FDCWD), ctypes.c_char_p(os.fsencode(target)),
            ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH | (_MOVE_MOUNT_BENEATH if is_beneath else 0)),
        )  # fmt: skip
    except OSError as error:
        error.filename = target
        raise


def unmount(target: str) -> None:
    """Detaches a mount and all mounts below it, even if they are in use (MNT_DETACH)."""
    _check("umount2", _libc.umount2(os.fsencode(target), MNT_DETACH | UMOUNT_NOFOLLOW))


def unmount_at(directory: int) -> None:
    """Takes away the mount whose root is an open directory, with all below it."""
    _check("umount2", _libc.umount2(b"/proc/self/fd/%d" % directory, MNT_DETACH))


def openat2(
    directory: int | None,
    path: os.PathLike[str] | str,
    flags: int,
    *,
    mode: int = 0,
    resolve: int = RESOLVE_NO_LINKS,
) -> int:
    """Opens a path by openat2(2), relative to `directory`. The error's filename is the path."""
    name = os.fsencode(path)
    if b"\0" in name:
        raise OSError(errno.EINVAL, "not a path", str(path))
    how = struct.pack("=QQQ", flags, mode, resolve)
    at = _AT_FDCWD if directory is None else directory
    for _ in range(_OPENAT2_TRIES_MAX):
        file = int(_waiting_libc.syscall(_OPENAT2, at, name, how, len(how)))
        if file >= 0:
            return file
        if (code := ctypes.get_errno()) not in (errno.EAGAIN, errno.EINTR):
            raise OSError(code, os.strerror(code), str(path))
    raise OSError(errno.EAGAIN, "its directories are being renamed by another process", str(path))


def set_filesystem_ids(uid: int, gid: int) -> tuple[int, int]:
    """Sets the ids that files are accessed as, of this thread alone; returns the earlier ones.

    The group comes first when root becomes another user, the user first on the way back: a user
    other than root may not change its group. The kernel reports no failure.
    """
    if uid == 0:
        user = int(_libc.setfsuid(ctypes.c_uint32(uid)))
        return user, int(_libc.setfsgid(ctypes.c_uint32(gid)))
    group = int(_libc.setfsgid(ctypes.c_uint32(gid)))
    return int(_libc.setfsuid(ctypes.c_uint32(uid))), group


def prctl(option: int, *arguments: int) -> None:
    """Changes an attribute of this process."""
    _check("prctl", _libc.prctl(option, *(*arguments, 0, 0, 0, 0)[:4]))


def drop_capabilities() -> None:
    """Empties the effective, permitted and inheritable sets of this process."""
    set_capabilities(permitted=0, effective=0)


def set_capabilities(*, permitted: int, effective: int, inheritable: int = 0) -> None:
    """Sets three sets of this process, each as bits.

    Only capabilities with numbers below 32 can be kept.
    """
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    sets = struct.pack("=6I", effective, permitted, inheritable, 0, 0, 0)
    _syscall("capset", ctypes.c_char_p(header), ctypes.c_char_p(sets))


def join_new_keyring() -> None:
    """Leaves the keys of the session behind."""
    _syscall(
        "keyctl", ctypes.c_long(_KEYCTL_JOIN_SESSION_KEYRING), ctypes.c_void_p(None),
        ctypes.c_long(0), ctypes.c_long(0), ctypes.c_long(0),
    )  # fmt: skip


def install_filter(program: bytes) -> None:
    """Puts a system call filter on this process and what it starts."""
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions of 8 bytes, padding, a pointer.
    head = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    set_mode_filter = 1
    _syscall("seccomp", ctypes.c_long(set_mode_filter), ctypes.c_long(0), ctypes.c_char_p(head))


def landlock_version() -> int:
    """Returns the version of the Landlock ABI; 0 if the kernel does not support it."""
    found: int = _libc.syscall(
        ctypes.c_long(_LANDLOCK_CREATE_RULESET),
        ctypes.c_void_p(None),
        ctypes.c_long(0),
        ctypes.c_long(_LANDLOCK_CREATE_RULESET_VERSION),
    )
    return max(found, 0)


def landlock_ruleset(attributes: bytes) -> int:
    """Makes a ruleset; returns its descriptor."""
    return _numbered(
        "landlock_create_ruleset",
        _LANDLOCK_CREATE_RULESET,
        ctypes.c_char_p(attributes),
        ctypes.c_long(len(attributes)),
        ctypes.c_long(0),
    )


def landlock_allow(ruleset: int, descriptor: int, access: int) -> None:
    """Allows `access` beneath the file or directory behind a descriptor."""
    rule = struct.pack("=Qi", access, descriptor)
    _numbered(
        "landlock_add_rule",
        _LANDLOCK_ADD_RULE,
        ctypes.c_long(ruleset),
        ctypes.c_long(_LANDLOCK_RULE_PATH_BENEATH),
        ctypes.c_char_p(rule),
        ctypes.c_long(0),
    )


def landlock_restrict(ruleset: int) -> None:
    """Puts the ruleset on this process and what it starts."""
    _numbered(
        "landlock_restrict_self",
        _LANDLOCK_RESTRICT_SELF,
        ctypes.c_long(ruleset),
        ctypes.c_long(0),
    )


def _syscall(name: str, *arguments: object) -> int:
    return _numbered(name, _SYSCALLS[MACHINE][name], *arguments)


def _numbered(name: str, number: int, *arguments: object) -> int:
    done: int = _libc.syscall(ctypes.c_long(number), *arguments)
    _check(name, done)
    return done


def _check(name: str, result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
