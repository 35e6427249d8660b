"""Memory mappings of this process: what /proc/self/maps says of them, and their system calls."""

from __future__ import annotations

import ctypes
import os
import re
from typing import NamedTuple

READ, WRITE, EXECUTE = 0x1, 0x2, 0x4
SHARED, PRIVATE, ANONYMOUS = 0x1, 0x2, 0x20
_MREMAP_MAYMOVE, _MREMAP_FIXED = 0x1, 0x2
_FAILED = ctypes.c_void_p(-1).value
_LINE = re.compile(r"(\w+)-(\w+) (\S{4}) (\w+) (\S+) (\d+) *(.*)")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mremap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
]  # fmt: skip


class Mapping(NamedTuple):
    """A line of /proc/PID/maps."""

    start: int
    size: int
    permissions: str
    offset: int
    device: str
    inode: int
    path: str
    """As the line has it: a newline is `\\012`. Empty without a name."""

    @property
    def is_private(self) -> bool:
        return self.permissions[3] == "p"

    @property
    def is_writable(self) -> bool:
        return self.permissions[1] == "w"

    @property
    def protection(self) -> int:
        flags = {"r": READ, "w": WRITE, "x": EXECUTE}
        return sum(flags[letter] for letter in self.permissions[:3] if letter != "-")


def parse(line: str) -> Mapping | None:
    """Parses a line of /proc/PID/maps. Returns None for any other line."""
    if match := _LINE.match(line):
        start, end, offset = (int(match[n], 16) for n in (1, 2, 4))
        return Mapping(start, end - start, match[3], offset, match[5], int(match[6]), match[7])
    return None


def create(size: int, protection: int, flags: int, file: int = -1, offset: int = 0) -> int:
    """Maps a file, or new memory, where the kernel likes; returns the address."""
    address: int | None = _libc.mmap(None, size, protection, flags, file, offset)
    _check(address != _FAILED)
    assert address is not None
    return address


def protect(address: int, size: int, protection: int) -> None:
    """Sets what the pages of a mapping can be used for."""
    _check(_libc.mprotect(address, size, protection) == 0)


def move(address: int, size: int, target: int) -> None:
    """Moves a mapping, in one step, to an address at which it replaces what is there."""
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
    _check(_libc.mremap(address, size, size, flags, target) != _FAILED)


def remove(address: int, size: int) -> None:
    """Removes a mapping."""
    _libc.munmap(address, size)


def _check(is_done: bool) -> None:
    if not is_done:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
