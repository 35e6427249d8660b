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
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from branching._linux import memory
from branching._linux.memory import Mapping

_MAPS, _PAGES, _MEMORY = (Path("/proc/self", name) for name in ("maps", "pagemap", "mem"))
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
_FACT_BYTES = 8
_IN_MEMORY, _IN_SWAP, _OF_FILE = 1 << 63, 1 << 62, 1 << 61
"""Flags of a page in /proc/self/pagemap."""
_CHUNK_BYTES = 1 << 20


class MappedFiles:
    """The mappings of files below a directory."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._paths: dict[tuple[str, int], str] = {}
        """The paths of mapped files, by device and inode number. In a forked child the kernel does
        not know them: the branch of the session is mounted nowhere."""
        self._following: list[Mapping] = []

    def let_fork(self) -> None:
        """Makes again what may keep the branch from being forked. Libraries do not."""
        for mapping in self._found():
            if not _leads_to_its_file(mapping):
                _copy(mapping)
            elif mapping.is_writable or not mapping.is_private:
                _renew(mapping)

    def leave(self) -> None:
        """Makes the memory ready for the end of the branch. `follow` comes after it."""
        self._following = []
        for mapping in self._found():
            if _leads_to_its_file(mapping):
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

    def _found(self) -> list[Mapping]:
        found = []
        for line in _MAPS.read_text(errors="surrogateescape").splitlines():
            if mapping := memory.parse(line):
                shown = mapping.path.replace("\\012", "\n")
                path = self._paths.get((mapping.device, mapping.inode), shown)
                if path.startswith(f"{self._directory}/"):
                    found.append(mapping._replace(path=path))
        self._paths = {(each.device, each.inode): each.path for each in found}
        return found


def _leads_to_its_file(mapping: Mapping) -> bool:
    """Whether the path is that of the mapped file, or of its copy in another branch."""
    with suppress(OSError):
        return os.lstat(mapping.path).st_ino == mapping.inode
    return False


def _renew(mapping: Mapping) -> None:
    """Maps the file at the mapping's path in its place."""
    is_private = mapping.is_private
    flags = memory.PRIVATE if is_private else memory.SHARED
    at_first = memory.READ | memory.WRITE if is_private else mapping.protection
    file = os.open(mapping.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        made = memory.create(mapping.size, at_first, flags, file, mapping.offset)
    finally:
        os.close(file)
    _put(made, mapping, _changed_pages(mapping) if is_private else ())


def _copy(mapping: Mapping) -> None:
    """Puts a copy of its pages in the place of a mapping."""
    flags = memory.PRIVATE | memory.ANONYMOUS
    made = memory.create(mapping.size, memory.READ | memory.WRITE, flags)
    _put(made, mapping, range(0, mapping.size, _CHUNK_BYTES), _CHUNK_BYTES)


def _put(made: int, mapping: Mapping, offsets: Iterable[int], size: int = _PAGE_BYTES) -> None:
    """Moves new pages into the place of a mapping, after copying some of its content to them."""
    try:
        with _MEMORY.open("rb", buffering=0) as pages:
            for offset in offsets:
                with suppress(OSError):  # beyond the end of the file
                    count = min(size, mapping.size - offset)
                    content = os.pread(pages.fileno(), count, mapping.start + offset)
                    ctypes.memmove(made + offset, content, len(content))
        memory.protect(made, mapping.size, mapping.protection)
        # One step: the code that does this may be in the mapping.
        memory.move(made, mapping.size, mapping.start)
    except BaseException:
        memory.remove(made, mapping.size)
        raise


def _changed_pages(mapping: Mapping) -> Iterator[int]:
    """Lists the pages of a private mapping that are not the file's any more."""
    first, count = mapping.start // _PAGE_BYTES, mapping.size // _PAGE_BYTES
    with _PAGES.open("rb", buffering=0) as pages:
        facts = os.pread(pages.fileno(), count * _FACT_BYTES, first * _FACT_BYTES)
    for number, fact in enumerate(memoryview(facts).cast("Q")):
        if fact & (_IN_MEMORY | _IN_SWAP) and not fact & _OF_FILE:
            yield number * _PAGE_BYTES
