"""Three versions of a text made one, by the program that everybody trusts with it: git."""

from __future__ import annotations

import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from branching.errors import BranchingError

MERGE_SECONDS_MAX = 60
_CONFLICTS_MAX = 127
"""`git merge-file` exits with the number of conflicts, of 127 and more with 127."""


def merge_texts(base: bytes, ours: bytes, theirs: bytes) -> bytes | None:
    """Returns the merge of both changes of `base`; None where they overlap.

    BranchingError where git is not there or fails.
    """
    with TemporaryDirectory(prefix="branching-merge-") as made:
        names = {"ours": ours, "base": base, "theirs": theirs}
        for name, content in names.items():
            Path(made, name).write_bytes(content)
        try:
            done = subprocess.run(
                ["git", "merge-file", "--stdout", *names],
                cwd=made,
                capture_output=True,
                timeout=MERGE_SECONDS_MAX,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BranchingError(
                f"texts cannot be merged: {error}",
                hint='install git, or choose another on_conflict: "keep", "theirs", "fail"',
            ) from error
    if done.returncode == 0:
        return done.stdout
    if 0 < done.returncode <= _CONFLICTS_MAX and done.stdout:
        return None
    raise BranchingError(f"git merge-file failed: {done.stderr.decode(errors='replace').strip()}")
