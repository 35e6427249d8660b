"""What a path is, in one line of text that is equal exactly where the results are.

    file 0644 sha256:…      link TARGET      directory 0755      pipe 0644, socket, device …

The mode counts, the content counts by its whole digest, whatever its encoding. Times and owners do
not: two runs that write the same file at different moments agree.
"""

from __future__ import annotations

import hashlib
import stat

from branching.fs.confined_dir import ConfinedDir

_CHUNK_BYTES = 1 << 20


def identity(tree: ConfinedDir, path: str) -> str:
    """Returns the identity of a path, "" if it is missing. Reads the file; raises OSError."""
    found = tree.lstat(path)
    if found is None:
        return ""
    mode = f"{stat.S_IMODE(found.st_mode):04o}"
    if stat.S_ISREG(found.st_mode):
        return f"file {mode} sha256:{digest(tree, path)}"
    if stat.S_ISLNK(found.st_mode):
        return f"link {tree.readlink(path)}"
    if stat.S_ISDIR(found.st_mode):
        return f"directory {mode}"
    return f"special {stat.S_IFMT(found.st_mode):o} {mode} {found.st_rdev}"


def identity_of_file(mode: int, content: bytes) -> str:
    """Returns the identity of a file whose content has been read."""
    return f"file {stat.S_IMODE(mode):04o} sha256:{hashlib.sha256(content).hexdigest()}"


def is_same_content(one: str, other: str) -> bool:
    """Tells whether two identities differ in their modes at most."""
    return one == other or (
        one.startswith("file ") and other.startswith("file ") and one.split()[2] == other.split()[2]
    )


def mode_of(identity_of_file: str) -> int:
    """Returns the mode that the identity of a file says."""
    return int(identity_of_file.split()[1], 8)


def digest(tree: ConfinedDir, path: str) -> str:
    """Returns the SHA-256 of a file in hexadecimal."""
    whole, offset = hashlib.sha256(), 0
    while True:
        data, _ = tree.read(path, offset=offset, limit=_CHUNK_BYTES)
        if not data:
            return whole.hexdigest()
        whole.update(data)
        offset += len(data)
