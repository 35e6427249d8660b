"""Mappings of workspace files in an interpreter that changes its branch. In the sandbox.

A mapping is bound to the branch in which its file was opened. A file that is mapped and open for
writing keeps that branch from being forked. FUSE reads no more pages of a branch that has ended:
touching one would kill the interpreter. So mappings are made again at the same addresses, of the
file that is seen now. Pages that the interpreter has changed are copied. Of a file that was deleted
or replaced, all pages are copied.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"(\w+)-(\w+) (....) (\w+) (\S+) (\d+) +(/.*)")
"""A line of /proc/self/maps: start, end, permissions, offset, device, inode number and path."""
_MAPS, _PAGES, _MEMORY = (Path("/proc/self", name) for name in ("maps", "pagemap", "mem"))
_READ, _WRITE, _EXECUTE = 0x1, 0x2, 0x4
_SHARED, _PRIVATE, _ANONYMOUS = 0x1, 0x2, 0x20
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
_FIXED = 0x1 | 0x2
"""MREMAP_MAYMOVE, MREMAP_FIXED."""
_FACT_BYTES = 8
_IN_MEMORY, _IN_SWAP, _OF_FILE = 1 << 63, 1 << 62, 1 << 61
"""Flags of a page in /proc/self/pagemap."""
_CHUNK_BYTES = 1 << 20
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mremap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
]  # fmt: skip


class _Mapping(NamedTuple):
    """Pages of a mapped file."""

    start: int
    size: int
    permissions: str
    offset: int
    device: str
    inode: int
    path: str

    @property
    def is_private(self) -> bool:
        return self.permissions[3] == "p"

    @property
    def protection(self) -> int:
        flags = {"r": _READ, "w": _WRITE, "x": _EXECUTE}
        return sum(flags[letter] for letter in self.permissions[:3] if letter != "-")

    def leads_to_its_file(self) -> bool:
        """Whether the path is that of the mapped file, or of its copy in another branch."""
        with suppress(OSError):
            return os.lstat(self.path).st_ino == self.inode
        return False


class MappedFiles:
    """The mappings of files below a directory."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._paths: dict[tuple[str, int], str] = {}
        """The paths of mapped files, by device and inode number. In a forked child the kernel does
        not know them: the branch of the session is mounted nowhere."""
        self._following: list[_Mapping] = []

    def let_fork(self) -> None:
        """Makes again what may keep the branch from being forked. Libraries do not."""
        for mapping in self._found():
            if not mapping.leads_to_its_file():
                _copy(mapping)
            elif mapping.permissions[1] == "w" or not mapping.is_private:
                _renew(mapping)

    def leave(self) -> None:
        """Makes the memory ready for the end of the branch. `follow` comes after it."""
        self._following = []
        for mapping in self._found():
            if mapping.leads_to_its_file():
                self._following.append(mapping)
            else:
                _copy(mapping)

    def follow(self) -> list[str]:
        """Maps the files that are seen now. Returns what could not be mapped, and why."""
        failed = []
        for mapping in self._following:
            try:
                _renew(mapping)
            except OSError as error:
                failed.append(f"the mapping of {mapping.path}: {error.strerror}")
        self._following = []
        return failed

    def _found(self) -> list[_Mapping]:
        found = []
        for line in _MAPS.read_text(errors="surrogateescape").splitlines():
            if match := _LINE.match(line):
                start, end, offset = (int(match[n], 16) for n in (1, 2, 4))
                file = match[5], int(match[6])
                path = self._paths.get(file, match[7].replace("\\012", "\n"))
                if path.startswith(f"{self._directory}/"):
                    found.append(_Mapping(start, end - start, match[3], offset, *file, path))
        self._paths = {(each.device, each.inode): each.path for each in found}
        return found


def _renew(mapping: _Mapping) -> None:
    """Maps the file at the mapping's path in its place."""
    is_private = mapping.is_private
    flags = _PRIVATE if is_private else _SHARED
    at_first = _READ | _WRITE if is_private else mapping.protection
    file = os.open(mapping.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        made = _libc.mmap(None, mapping.size, at_first, flags, file, mapping.offset)
    finally:
        os.close(file)
    _put(made, mapping, _changed_pages(mapping) if is_private else ())


def _copy(mapping: _Mapping) -> None:
    """Puts a copy of its pages in the place of a mapping."""
    protection, flags = _READ | _WRITE, _PRIVATE | _ANONYMOUS
    made = _libc.mmap(None, mapping.size, protection, flags, -1, 0)
    _put(made, mapping, range(0, mapping.size, _CHUNK_BYTES), _CHUNK_BYTES)


def _put(made: int, mapping: _Mapping, offsets: Iterable[int], size: int = _PAGE_BYTES) -> None:
    """Moves new pages into the place of a mapping, after copying some of its content to them."""
    _check(made != _FAILED)
    try:
        with _MEMORY.open("rb", buffering=0) as memory:
            for offset in offsets:
                with suppress(OSError):  # beyond the end of the file
                    count = min(size, mapping.size - offset)
                    content = os.pread(memory.fileno(), count, mapping.start + offset)
                    ctypes.memmove(made + offset, content, len(content))
        _check(_libc.mprotect(made, mapping.size, mapping.protection) == 0)
        # One step: the code that does this may be in the mapping.
        moved = _libc.mremap(made, mapping.size, mapping.size, _FIXED, mapping.start)
        _check(moved != _FAILED)
    except BaseException:
        _libc.munmap(made, mapping.size)
        raise


def _changed_pages(mapping: _Mapping) -> Iterator[int]:
    """Lists the pages of a private mapping that are not the file's any more."""
    first, count = mapping.start // _PAGE_BYTES, mapping.size // _PAGE_BYTES
    with _PAGES.open("rb", buffering=0) as pages:
        facts = os.pread(pages.fileno(), count * _FACT_BYTES, first * _FACT_BYTES)
    for number, fact in enumerate(memoryview(facts).cast("Q")):
        if fact & (_IN_MEMORY | _IN_SWAP) and not fact & _OF_FILE:
            yield number * _PAGE_BYTES


def _check(is_done: bool) -> None:
    if not is_done:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
