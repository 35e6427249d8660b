"""The repository of a git worktree or submodule, which lies outside of the directory.

In such a directory `.git` is a file:

    gitdir: /home/me/project/.git/worktrees/fix       which names the repository by `commondir`
    gitdir: ../.git/modules/library                   which is the repository

git finds it in a container if it is mounted, read-only, at its own path. The file may come from a stranger and could
name any directory of the host. So the repository is only mounted if it names the directory, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

FILE_BYTES_MAX = 1 << 16


def repository(workspace: Path) -> Path | None:
    """Returns the repository to mount for a directory; None unless it lies elsewhere and names the directory."""
    git = workspace / ".git"
    if git.is_symlink() or not git.is_file():
        return None
    pointed = read(git).removeprefix("gitdir:").strip()
    if not pointed:
        return None
    place = (workspace / pointed).resolve()
    if names_back(place, workspace):
        found = (place / (read(place / "commondir").strip() or ".")).resolve()
        is_outside = found != workspace and workspace not in found.parents
        if is_outside and found in (place, *place.parents) and (found / "objects").is_dir():
            return found
    return None


def names_back(place: Path, workspace: Path) -> bool:
    """Returns whether a git directory belongs to the workspace, by its own files."""
    if back := read(place / "gitdir").strip():
        return (place / back).resolve() == (workspace / ".git").resolve()
    for line in read(place / "config").splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "worktree":
            return (place / value.strip().strip('"')).resolve() == workspace
    return False


def read(path: Path) -> str:
    """Returns the beginning of a small file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(FILE_BYTES_MAX).decode(errors="replace")
    except OSError:
        return ""
