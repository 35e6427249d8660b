"""A directory for the temporary files of one command, which go with it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from branching.errors import ForkError
from branching.process.run_as import Owner


@contextmanager
def scratch_directory(owner: Owner | None) -> Iterator[Path]:
    """Yields a new directory that belongs to `owner`, or to us; it is removed after."""
    try:
        path = Path(tempfile.mkdtemp(prefix="branching-tmp-"))
    except OSError as error:
        raise ForkError(
            f"no directory for temporary files could be made: {error.strerror}; nothing ran",
            hint="make room in /tmp, or point TMPDIR elsewhere",
            path=error.filename,
        ) from error
    try:
        if owner is not None:
            os.chown(path, owner.uid, owner.gid)
        yield path
    finally:
        # What a dying process still writes there may make rmtree miss a file: nothing of value is
        # in it, and nobody could be told.
        shutil.rmtree(path, ignore_errors=True)
