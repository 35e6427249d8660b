"""A second wall around the files: Landlock, where the kernel has it.

Mounts already decide what can be reached and written. Landlock says the same once more in other
words, needs no privilege, and holds in namespaces too: reading and running everywhere, writing
beneath the named places only. Since version 6 it also keeps abstract sockets and signals inside.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable

from branching._linux import syscalls

VERSION_MIN = 2
"""Version 1 forbids all renames from one directory to another, which programs need."""

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL = 1, 2, 4, 8, 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_ALL_BY_VERSION = {2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF}
_SCOPES_SINCE = 6
_ABSTRACT_SOCKETS_AND_SIGNALS = 3


def restrict(writable: Iterable[str], descriptors: Iterable[int]) -> None:
    """Restricts this process: writing beneath `writable`, and to the files already open as
    `descriptors` when they are opened again (/dev/stdout). Does nothing without Landlock.
    """
    version = syscalls.landlock_version()
    if version < VERSION_MIN:
        return
    handled = _ALL_BY_VERSION[min(version, max(_ALL_BY_VERSION))]
    scopes = _ABSTRACT_SOCKETS_AND_SIGNALS if version >= _SCOPES_SINCE else 0
    attributes = struct.pack("=QQQ", handled, 0, scopes)
    ruleset = syscalls.landlock_ruleset(attributes if version >= _SCOPES_SINCE else attributes[:8])
    try:
        _allow_path(ruleset, "/", _READ)
        for path in writable:
            _allow_path(ruleset, path, handled)
        for descriptor in descriptors:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                syscalls.landlock_allow(ruleset, descriptor, handled & _OF_FILES)
        syscalls.landlock_restrict(ruleset)
    finally:
        os.close(ruleset)


def _allow_path(ruleset: int, path: str, access: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            access &= _OF_FILES
        syscalls.landlock_allow(ruleset, descriptor, access)
    finally:
        os.close(descriptor)
