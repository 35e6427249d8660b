"""A sandbox to get out of: a branch of a workspace, with all that its processes must not reach.

The mounts are not below /tmp: what lies there is out of sight for that alone. They are made once
for many attempts; each attempt has a branch of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from branching import Branch, Workspace
from support.branchfs import mounted
from support.sandbox import Said, run_in

SECRET = "a sibling's secret"
OWNER = (12345, 12346)


class Prison:
    """A workspace with a sibling, beside another workspace of the same owner."""

    def __init__(self, place: Path, owner: tuple[int, int] | None) -> None:
        self.place = place
        self.owner = owner
        self.is_namespaced = False
        """Its sandboxes are made without root's privileges, in user namespaces."""
        self.base, self.root = place / "base", place / "mount"
        self.other_base, self.other_root = place / "other base", place / "other mount"
        self.space, self.other_space = Workspace(self.root), Workspace(self.other_root)
        self.sibling = _with_secret(self.space, "sibling")
        self.others = _with_secret(self.other_space, "others")

    def close(self) -> None:
        self.sibling.abort()
        self.others.abort()
        self.space.close()
        self.other_space.close()


@contextmanager
def standing(owner: tuple[int, int] | None) -> Iterator[Prison]:
    """Mounts both workspaces for the length of the `with`."""
    place = Path(tempfile.mkdtemp(prefix="branching-test-", dir="/opt"))
    place.chmod(0o755)
    try:
        for base in (place / "base", place / "other base"):
            base.mkdir()
            (base / "seed.txt").write_text("seed\n")
            if owner is not None:
                for path in (base, base / "seed.txt"):
                    os.chown(path, *owner)
        with (
            mounted(place / "base", place / "mount"),
            mounted(place / "other base", place / "other mount"),
        ):
            prison = Prison(place, owner)
            yield prison
            prison.close()
    finally:
        shutil.rmtree(place)


class Cell:
    """A branch whose sandbox attempts are made in. An attempt that gets out prints ESCAPED."""

    def __init__(self, prison: Prison) -> None:
        self.prison = prison
        self.branch = prison.space.branch("cell", on_success=None).__enter__()
        self.outsider = subprocess.Popen(["sleep", "600"])
        self.words = {
            "BASE": str(prison.base),
            "ROOT": str(prison.root),
            "SIBLING": str(prison.sibling.path),
            "CONTROL": _control(prison.root),
            "OTHER_BASE": str(prison.other_base),
            "OTHER_ROOT": str(prison.other_root),
            "OTHER_CONTROL": _control(prison.other_root),
            "OUTSIDER": str(self.outsider.pid),
            "TEST": str(os.getpid()),
        }

    def attempt(self, script: str, **options: Any) -> Said:
        names = "\n".join(f"{name}='{value}'" for name, value in self.words.items())
        return run_in(self.branch.path, f"{names}\n{script}", owner=self.prison.owner, **options)

    def python(self, code: str, **options: Any) -> Said:
        names = "\n".join(f"{name} = {value!r}" for name, value in self.words.items())
        (self.branch.path / "attempt.py").write_text(f"{names}\n{code}")
        return self.attempt("python3 attempt.py", **options)

    def close(self) -> None:
        """Ends it, and finds all that is outside as it was."""
        ended = self.outsider.poll()
        self.outsider.kill()
        self.outsider.wait()
        self.branch.abort()
        assert ended is None, "a process outside was ended"
        base = self.prison.base
        assert sorted(path.name for path in base.iterdir()) == [".branching", "seed.txt"]
        assert (base / "seed.txt").read_text() == "seed\n"
        assert (self.prison.sibling.path / "secret").read_text() == SECRET


def _control(root: Path) -> str:
    return os.fsdecode(os.getxattr(root, "user.branchfs.control"))


def _with_secret(space: Workspace, name: str) -> Branch:
    branch = space.branch(name, on_success=None).__enter__()
    (branch.path / "secret").write_text(SECRET)
    return branch
