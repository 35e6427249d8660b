"""The environment of a function or command in a branch, and its directory for temporary files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from branching.errors import ForkError
from branching.process.run_as import Owner
from branching.process.sandbox import OWN_TMP

_CLEAN = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "COLORTERM")
_CLEAN_PREFIX = "LC_"
"""Variables that a clean environment keeps: user, paths, locale, terminal; no keys or tokens."""


def inherited_environment(*, is_clean: bool) -> dict[str, str]:
    """Returns our own environment, or the part of it that holds no keys and no tokens."""
    return {
        name: value
        for name, value in os.environ.items()
        if not is_clean or name in _CLEAN or name.startswith(_CLEAN_PREFIX)
    }


def environment_for(
    at: Path,
    owner: Owner | None,
    *,
    added: Mapping[str, str],
    is_clean: bool = False,
    has_own_tmp: bool = True,
) -> dict[str, str]:
    """Returns our environment, or its clean part, with the variables about the branch."""
    environment = inherited_environment(is_clean=is_clean)
    if owner is not None:
        environment.update(owner.environment())
    environment |= {"BRANCHING": "1", "BRANCHING_WORKSPACE": str(at), "PWD": str(at)}
    if has_own_tmp:
        environment["TMPDIR"] = str(OWN_TMP)
    return environment | dict(added)


@contextmanager
def scratch_directory(owner: Owner | None) -> Iterator[Path]:
    """Creates a directory for the length of the `with`, then removes it with its content.

    Args:
        owner: Its owner. Default: the user of this process.

    Raises:
        ForkError: The directory could not be created.
    """
    import tempfile

    try:
        path = Path(tempfile.mkdtemp(prefix="branching-tmp-"))
    except OSError as error:
        raise ForkError(
            f"no directory for temporary files could be made: {error.strerror}; nothing ran",
            hint="free space in /tmp, or point TMPDIR elsewhere",
            path=error.filename,
        ) from error
    try:
        if owner is not None:
            os.chown(path, owner.uid, owner.gid)
        yield path
    finally:
        # A process that is being killed may still create files, so rmtree may fail. The content
        # has no value, and there is no caller to report the error to.
        import shutil

        shutil.rmtree(path, ignore_errors=True)
