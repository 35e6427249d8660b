"""Hints after a command that failed because of the sandbox or the image."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from branching._caller import host_directory
from branching._exit_codes import EXIT_NOT_FOUND

EXIT_GIT_FATAL = 128
_PRIVATE_TMP = ("/tmp", "/var/tmp")
_READ_ONLY_WORDS = ("Read-only file system", "EROFS", "os error 30")
"""What a program prints that was refused a write: by the C library, by Node.js, by Rust."""
_FULL_DISK_WORDS = ("No space left on device", "ENOSPC", "os error 28")
"""The same for a write that found no room on the disk."""
_CACHE_IN_HOME = re.compile(r"/\.cache/[\w.-]+|/\.cargo/(?:registry|git)|/\.[\w.-]+|/go")
"""After the path of the home directory: what `--cache` can make writable for the tool that printed
the path."""
_TEXT_CHARACTERS_MAX = 4096
"""Of the output before a refused write, in which a path is looked for: tools name it some lines
before or after the error."""
CACHE_EXAMPLE = "~/.cargo/registry"


class RefusedWrites:
    """What the output of commands says of writes that were refused."""

    was_read_only = False
    was_disk_full = False
    cache: str | None = None
    """The directory of the home, with ~, that the output names near a write that was refused."""

    def __init__(self) -> None:
        self._text = ""

    def read(self, text: str) -> None:
        """Looks through a part of the output."""
        self.was_read_only |= any(word in text for word in _READ_ONLY_WORDS)
        self.was_disk_full |= any(word in text for word in _FULL_DISK_WORDS)
        self._text = (self._text + text)[-_TEXT_CHARACTERS_MAX:]
        if self.was_read_only and self.cache is None:
            self.cache = _cache_named_in(self._text)


def read_only_hint(cache: str | None) -> str:
    """Returns the hint for a command that was refused a write, for example to `cache`."""
    return (
        "in a branch, only the directory, /tmp and /var/tmp can be written; the home directory is "
        f"read-only. Make the tool's cache writable (--cache {cache or CACHE_EXAMPLE}), or point "
        "it into /tmp (CARGO_HOME, npm_config_cache, XDG_CACHE_HOME, PIP_CACHE_DIR)"
    )


def patch_hint(branches: Sequence[str]) -> str | None:
    """Returns the hint after a signal: where the changes of these branches are saved."""
    if not branches:
        return None
    more = f" (and {len(branches) - 1} more: branching log)" if len(branches) > 1 else ""
    return f"what was changed is saved: branching log --patch {branches[0]}{more}"


def race_advice(refused: RefusedWrites) -> list[str]:
    """Returns the hints for a race in which no candidate succeeded."""
    if refused.was_disk_full:
        return ["the disk is full; free space on it (branching ls lists branches that are kept)"]
    return [read_only_hint(refused.cache)] if refused.was_read_only else []


def advice(
    command: Sequence[str],
    code: int,
    base: Path,
    *,
    refused: RefusedWrites,
    has_started: bool = True,
    kept: str | None = None,
) -> list[str]:
    """Returns the hints for a command that ended with `code`.

    Args:
        command: the command's words.
        code: its exit code.
        base: the directory that was branched.
        refused: what its output says of refused writes.
        has_started: whether its program could be executed.
        kept: the branch, if it stays open.
    """
    if code == EXIT_NOT_FOUND and host_directory() is not None:
        import shutil

        is_here = shutil.which(command[0]) is not None
        what = "a program that it starts" if is_here else repr(command[0])
        how = "branching-docker init writes a Dockerfile that adds the project's tools"
        return [f"{what} is not in the image; {how}: docs/image.md#your-own-tools"]
    hints = []
    if not has_started and (found := _found_here(command[0])) is not None:
        hints.append(
            f"outside of the branch {command[0]!r} is {found}; in a branch commands run as the "
            f"directory's owner (user {base.stat().st_uid}), who cannot execute it there. Install "
            "it where every user can reach it"
        )
    elif code == EXIT_GIT_FATAL and (repository := _outer_repository(base)) is not None:
        is_hidden = any(Path(repository).is_relative_to(place) for place in _PRIVATE_TMP)
        hints.append(
            f"the directory is a git worktree or submodule, and its repository {repository} is "
            + (
                "in a directory that is private in each branch: git does not find it. Move the "
                "repository out of /tmp and /var/tmp"
                if is_hidden
                else "outside of it: in a branch git can read it and not write to it. Commit to "
                "git after the branch is committed"
            )
        )
    elif code != 0 and refused.was_disk_full and kept is not None:
        hints.append(
            f"the disk is full, and branch {kept} keeps what was written; branching abort "
            f"{shlex.quote(kept)} drops it and frees the space"
        )
    elif code != 0 and refused.was_read_only:
        hints.append(read_only_hint(refused.cache))
    return hints


def _found_here(name: str) -> str | None:
    """Returns the path of a program that is named without one, None if this process has none."""
    import shutil

    return None if "/" in name or host_directory() is not None else shutil.which(name)


def _cache_named_in(text: str) -> str | None:
    """Returns the first directory of the home that `--cache` takes and that a text names."""
    from branching.cli.cache_option import KEYS_OF_HOME

    home = os.path.expanduser("~")  # noqa: PTH111 - a text, to compare with one
    for found in re.finditer(rf"(?<![\w.-]){re.escape(home)}({_CACHE_IN_HOME.pattern})", text):
        if not any(f"/{name}/".startswith(f"{found[1]}/") for name in KEYS_OF_HOME):
            return f"~{found[1]}"
    return None


def _outer_repository(base: Path) -> str | None:
    """Returns the path that a file `.git` names, None if there is no such file."""
    try:
        with (base / ".git").open(encoding="utf-8") as file:
            key, _, path = file.read(os.pathconf("/", "PC_PATH_MAX")).partition(":")
    except (OSError, UnicodeDecodeError):
        return None
    return path.strip() if key == "gitdir" else None
