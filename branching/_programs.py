"""Where the programs are that this package starts."""

from __future__ import annotations

import os
import shutil
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
    found = shutil.which(wanted)
    if found is None:
        raise MountError(
            f"there is no program {wanted!r}, which mounts directories",
            hint="cargo install --path branchfs; or work in a container: branching-docker",
            path=wanted,
        )
    return Path(found)
