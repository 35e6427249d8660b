"""Hints after a command that failed because of the sandbox or the image."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from branching._exit_codes import EXIT_NOT_FOUND
from branching.cli.caller import host_directory

EXIT_GIT_FATAL = 128
READ_ONLY_WORDS = ("Read-only file system", "EROFS", "os error 30")
"""What a program prints that was refused a write: by the C library, by Node.js, by Rust."""
READ_ONLY_HINT = (
    "in a branch, only the directory, /tmp and /var/tmp can be written; the home directory is "
    "read-only. Point the tool's cache into /tmp or the directory (CARGO_HOME, npm_config_cache, "
    "XDG_CACHE_HOME, PIP_CACHE_DIR)"
)


def advice(command: Sequence[str], code: int, base: Path, *, was_read_only: bool) -> list[str]:
    """Returns the hints for a command that ended with `code`.

    Args:
        command: the command's words.
        code: its exit code.
        base: the directory that was branched.
        was_read_only: whether its output says that a write was refused as read-only.
    """
    if code == EXIT_NOT_FOUND and host_directory() is not None:
        is_here = shutil.which(command[0]) is not None
        what = "a program that it runs" if is_here else repr(command[0])
        how = "branching-docker init writes a Dockerfile that adds the project's tools"
        return [f"{what} is not in the image; {how}: docs/image.md#your-own-tools"]
    hints = []
    if code == EXIT_GIT_FATAL and (repository := _outer_repository(base)) is not None:
        hints.append(
            f"the directory is a git worktree or submodule, and its repository {repository} is "
            "outside of it: in a branch git can read it and not write to it. Commit to git after "
            "the branch is committed"
        )
    elif code != 0 and was_read_only:
        hints.append(READ_ONLY_HINT)
    return hints


def _outer_repository(base: Path) -> str | None:
    """Returns the path that a file `.git` names, None if there is no such file."""
    try:
        with (base / ".git").open(encoding="utf-8") as file:
            key, _, path = file.read(os.pathconf("/", "PC_PATH_MAX")).partition(":")
    except (OSError, UnicodeDecodeError):
        return None
    return path.strip() if key == "gitdir" else None
