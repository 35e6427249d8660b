"""A branch in a sandbox, beside the files and processes that the sandbox must not reach.

The mounts are not below /tmp, because a sandbox hides /tmp anyway. They are made once for many
attempts to escape; each attempt has its own branch.
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


class WorkspacePair:
    """Two workspaces of one owner, each with a branch that holds a secret."""

    def __init__(self, place: Path, owner: tuple[int, int] | None) -> None:
        self.place = place
        self.owner = owner
        self.is_namespaced = False
        """Its sandboxes are made in user namespaces, without root's privileges."""
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
def mounted_pair(owner: tuple[int, int] | None) -> Iterator[WorkspacePair]:
    """Mounts two workspaces; unmounts and removes them at the end of the `with`."""
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
            pair = WorkspacePair(place, owner)
            yield pair
            pair.close()
    finally:
        shutil.rmtree(place)


class SandboxedBranch:
    """A branch and its sandbox. A script that escapes prints ESCAPED."""

    def __init__(self, pair: WorkspacePair) -> None:
        self.pair = pair
        self.branch = pair.space.branch("attempt", on_success=None).__enter__()
        self.outsider = subprocess.Popen(["sleep", "600"])
        self.words = {
            "BASE": str(pair.base),
            "ROOT": str(pair.root),
            "SIBLING": str(pair.sibling.path),
            "CONTROL": _control(pair.root),
            "OTHER_BASE": str(pair.other_base),
            "OTHER_ROOT": str(pair.other_root),
            "OTHER_CONTROL": _control(pair.other_root),
            "OUTSIDER": str(self.outsider.pid),
            "TEST": str(os.getpid()),
        }

    def attempt(self, script: str, **options: Any) -> Said:
        names = "\n".join(f"{name}='{value}'" for name, value in self.words.items())
        return run_in(self.branch.path, f"{names}\n{script}", owner=self.pair.owner, **options)

    def python(self, code: str, **options: Any) -> Said:
        names = "\n".join(f"{name} = {value!r}" for name, value in self.words.items())
        (self.branch.path / "attempt.py").write_text(f"{names}\n{code}")
        return self.attempt("python3 attempt.py", **options)

    def close(self) -> None:
        """Ends the branch and checks that everything outside is unchanged."""
        ended = self.outsider.poll()
        self.outsider.kill()
        self.outsider.wait()
        self.branch.abort()
        assert ended is None, "a process outside was ended"
        base = self.pair.base
        assert sorted(path.name for path in base.iterdir()) == [".branching", "seed.txt"]
        assert (base / "seed.txt").read_text() == "seed\n"
        assert (self.pair.sibling.path / "secret").read_text() == SECRET


def _control(root: Path) -> str:
    return os.fsdecode(os.getxattr(root, "user.branchfs.control"))


def _with_secret(space: Workspace, name: str) -> Branch:
    branch = space.branch(name, on_success=None).__enter__()
    (branch.path / "secret").write_text(SECRET)
    return branch
