"""The system calls that a sandboxed process may not make, as a program for the kernel's filter.

What is refused is what an ordinary user has no use for and what an attacker wants most: making
namespaces and mounts (a way to get capabilities), keys (shared between processes of a
user), loading code into the kernel, and typing into the terminal (TIOCSTI: a command on our
terminal could type into the shell that started it); and what goes past filters and namespaces:
rings (io_uring) and unusual sockets. So is what changes the priority, processors or limits of the
sandbox's first process, which keeps the time limit and has the same user. The list is that of a
container without SYS_ADMIN; a filter of the container stays in force as well.

Numbers differ by architecture, and a process can make calls of more than one: each that the
machine can run has its own table, all others are refused.
"""

from __future__ import annotations

import errno
import socket
import struct
from functools import cache

_REFUSED = (
    "mount", "umount2", "umount", "pivot_root", "move_mount", "open_tree", "fsopen", "fsconfig",
    "fsmount", "fspick", "mount_setattr", "setns", "bpf", "perf_event_open", "kexec_load",
    "kexec_file_load", "init_module", "finit_module", "delete_module", "open_by_handle_at",
    "keyctl", "add_key", "request_key", "userfaultfd", "swapon", "swapoff", "reboot", "acct",
    "io_uring_setup",
)  # fmt: skip
_NAMESPACES = 0x7E020000 | 0x80
"""All CLONE_NEW* flags; 0x80 is that of time namespaces."""
_NEW_MOUNT_TABLE = 0x00020000
"""CLONE_NEWNS."""
_CLONE_SIGNAL = 0xFF
"""Of clone's flags the lowest byte is a signal: there 0x80 means nothing."""
_TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI types a character; TIOCLINUX pastes the console's selection."""

_INIT = 1
"""The number of the first process in its namespace."""
_OF_PROCESS = (
    "sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler", "prlimit64"
)  # fmt: skip
"""Calls whose first argument is a process."""
_OF_PROCESSES = {"setpriority": 2, "ioprio_set": 3}
"""Calls whose first argument says what the second one is; this value: all processes of a user."""

_UNKNOWN_HERE = ("clone3", "socketcall")
"""Calls whose arguments lie in memory, out of a filter's sight. The C library uses others then."""
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
"""The only sockets. Others lead past the network namespace (vsock: to whom this machine is a
guest), or to parts of the kernel that are seldom used."""

_SINCE_5 = {
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
    "fspick": 433, "mount_setattr": 442, "clone3": 435, "io_uring_setup": 425,
}  # fmt: skip
_X86_64 = _SINCE_5 | {
    "ioctl": 16, "clone": 56, "pivot_root": 155, "acct": 163, "mount": 165, "umount2": 166,
    "swapon": 167, "swapoff": 168, "reboot": 169, "init_module": 175, "delete_module": 176,
    "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272,
    "perf_event_open": 298, "open_by_handle_at": 304, "setns": 308, "finit_module": 313,
    "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "socket": 41, "setpriority": 141,
    "sched_setparam": 142, "sched_setscheduler": 144, "sched_setaffinity": 203, "ioprio_set": 251,
    "prlimit64": 302, "sched_setattr": 314,
}  # fmt: skip
_I386 = _SINCE_5 | {
    "ioctl": 54, "clone": 120, "pivot_root": 217, "acct": 51, "mount": 21, "umount2": 52,
    "umount": 22, "swapon": 87, "swapoff": 115, "reboot": 88, "init_module": 128,
    "delete_module": 129, "kexec_load": 283, "add_key": 286, "request_key": 287, "keyctl": 288,
    "unshare": 310, "perf_event_open": 336, "open_by_handle_at": 342, "setns": 346,
    "finit_module": 350, "bpf": 357, "userfaultfd": 374, "socket": 359, "socketcall": 102,
    "setpriority": 97, "sched_setparam": 154, "sched_setscheduler": 156, "sched_setaffinity": 241,
    "ioprio_set": 289, "prlimit64": 340, "sched_setattr": 351,
}  # fmt: skip
_AARCH64 = _SINCE_5 | {
    "ioctl": 29, "clone": 220, "pivot_root": 41, "acct": 89, "mount": 40, "umount2": 39,
    "swapon": 224, "swapoff": 225, "reboot": 142, "init_module": 105, "delete_module": 106,
    "kexec_load": 104, "add_key": 217, "request_key": 218, "keyctl": 219, "unshare": 97,
    "perf_event_open": 241, "open_by_handle_at": 265, "setns": 268, "finit_module": 273,
    "kexec_file_load": 294, "bpf": 280, "userfaultfd": 282, "socket": 198, "setpriority": 140,
    "sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122, "ioprio_set": 30,
    "prlimit64": 261, "sched_setattr": 274,
}  # fmt: skip

_TABLES = {
    "x86_64": [(0xC000003E, _X86_64), (0x40000003, _I386)],
    "aarch64": [(0xC00000B7, _AARCH64)],
}
"""By machine: the architectures (AUDIT_ARCH_*) whose calls it can make."""
_X32_BIT = 0x40000000
"""A third set of calls on x86_64, hardly used and easily forgotten: refused as a whole."""

_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24
_ALLOW = 0x7FFF0000
_REFUSE = 0x00050000


@cache
def program(machine: str, *, is_session: bool = False) -> bytes:
    """Returns the filter for a machine. KeyError for one whose calls are not known.

    With `is_session` a process may copy its mount table: `unshare` with CLONE_NEWNS and no other
    flag. That needs a capability, too.
    """
    tables = _TABLES[machine]
    blocks = [
        (architecture, _block(table, machine, is_session=is_session))
        for architecture, table in tables
    ]
    code = b""
    for architecture, block in blocks:
        count = len(block) // 8
        # A jump within a filter reaches 255 instructions; a block has about 210.
        code += _op(_LOAD, _ARCHITECTURE) + _op(_JUMP_EQUAL, architecture, 0, count) + block
    return code + _op(_RETURN, _REFUSE | errno.ENOSYS)


def _block(table: dict[str, int], machine: str, *, is_session: bool) -> bytes:
    """Decides about the calls of one architecture; every way through it ends."""
    code = _op(_LOAD, _NUMBER)
    if machine == "x86_64":
        code += _op(_JUMP_ABOVE, _X32_BIT, 0, 1) + _op(_RETURN, _REFUSE | errno.ENOSYS)
    cases = {table[name]: _op(_RETURN, _REFUSE | errno.EPERM) for name in _REFUSED if name in table}
    for name in _UNKNOWN_HERE:
        if name in table:
            cases[table[name]] = _op(_RETURN, _REFUSE | errno.ENOSYS)
    cases[table["clone"]] = _unless(_NAMESPACES & ~_CLONE_SIGNAL)
    cases[table["unshare"]] = _unless(_NAMESPACES)
    if is_session:
        copies_mounts = _op(_LOAD, _ARGUMENT_0) + _op(_JUMP_EQUAL, _NEW_MOUNT_TABLE, 0, 1)
        cases[table["unshare"]] = copies_mounts + _op(_RETURN, _ALLOW) + cases[table["unshare"]]
    family = _op(_LOAD, _ARGUMENT_0)
    for known in _FAMILIES:
        family += _op(_JUMP_EQUAL, known, 0, 1) + _op(_RETURN, _ALLOW)
    cases[table["socket"]] = family + _op(_RETURN, _REFUSE | errno.EAFNOSUPPORT)
    typing = _op(_LOAD, _ARGUMENT_1)
    for request in _TERMINAL_INPUT:
        typing += _op(_JUMP_EQUAL, request, 0, 1) + _op(_RETURN, _REFUSE | errno.EPERM)
    cases[table["ioctl"]] = typing + _op(_RETURN, _ALLOW)
    refused = _op(_RETURN, _REFUSE | errno.EPERM)
    of_init = _op(_JUMP_EQUAL, _INIT, 0, 1) + refused + _op(_RETURN, _ALLOW)
    for name in _OF_PROCESS:
        cases[table[name]] = _op(_LOAD, _ARGUMENT_0) + of_init
    for name, of_user in _OF_PROCESSES.items():
        kind = _op(_LOAD, _ARGUMENT_0) + _op(_JUMP_EQUAL, of_user, 0, 1) + refused
        cases[table[name]] = kind + _op(_LOAD, _ARGUMENT_1) + of_init
    return code + _search(sorted(cases.items()))


def _search(cases: list[tuple[int, bytes]]) -> bytes:
    """Finds what is to be done about a call, and allows it if that is nothing.

    By halves: when a filter is installed the kernel runs it for every call that there is, to
    remember which are always allowed.
    """
    if len(cases) == 1:
        [(number, code)] = cases
        return _op(_JUMP_EQUAL, number, 0, len(code) // 8) + code + _op(_RETURN, _ALLOW)
    middle = len(cases) // 2
    below = _search(cases[:middle])
    return _op(_JUMP_ABOVE, cases[middle][0], len(below) // 8) + below + _search(cases[middle:])


def _unless(flags: int) -> bytes:
    """Refuses a call if one of the flags is set in its first argument, else allows it."""
    test = _op(_LOAD, _ARGUMENT_0) + _op(_JUMP_SET, flags, 0, 1)
    return test + _op(_RETURN, _REFUSE | errno.EPERM) + _op(_RETURN, _ALLOW)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
