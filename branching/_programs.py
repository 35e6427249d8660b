"""Where the programs are that this package starts."""

from __future__ import annotations

import os
from pathlib import Path

from branching.errors import MountError

PROGRAM = "branchfs"
PROGRAM_VARIABLE = "BRANCHFS"
"""Names the program where it is not on PATH."""


def find_branchfs(name: str | os.PathLike[str] | None = None) -> Path:
    """Returns the program `branchfs`, which mounts directories and starts sandboxes.

    Args:
        name: Its name or path. Default: that in the environment variable BRANCHFS, else `branchfs`.

    Raises:
        MountError: There is no such program.
    """
    wanted = os.fspath(name or os.environ.get(PROGRAM_VARIABLE) or PROGRAM)
    paths = [Path(wanted)]
    # As shutil.which, which would add 3 % to the time that `branching run` takes to load modules.
    if "/" not in wanted:
        paths = [Path(place, wanted) for place in os.get_exec_path() if place]
    for path in paths:
        if path.is_file() and os.access(path, os.X_OK):
            return path
    raise MountError(
        f"there is no program {wanted!r}, which mounts directories",
        hint="cargo install --path branchfs; or work in a container: branching-docker",
        path=wanted,
    )
