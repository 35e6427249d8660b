"""A workspace: an existing mount of a branching file system, found from any path inside it.

Opened from a path inside a branch it stands for that branch: what is forked from it is nested in
the branch and commits into it. So a candidate that races others itself gets the winner into its
own branch, not past it into main, where it would make itself stale.
"""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path

from branching.errors import BranchNotFoundError, MountError
from branching.fs.backend import MAIN_ID, Backend, BranchRecord
from branching.fs.branch import Branch, OnError, OnSuccess
from branching.fs.branchfs import BranchFS
from branching.fs.mounts import Mount, mounts_around

_BACKENDS = (BranchFS,)
"""Every file system we can branch, in the order they are asked."""


class Workspace:
    """Opens the mount that `path` lies in; `path` may be deep inside it, or inside a branch.

    Raises MountError where there is no such mount, or nobody answers for it, and
    BranchNotFoundError when `path` lies in a branch that is gone.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._backend = _open(Path(path))
        self._branch = _branch_around(Path(path), self._backend)

    @property
    def path(self) -> Path:
        """The root of the mount, which shows main; the branch's directory if opened in one."""
        return self._branch.path if self._branch else self._backend.root

    @property
    def root(self) -> Path:
        """The root of the mount in any case."""
        return self._backend.root

    @property
    def base(self) -> Path:
        """The directory that the workspace branches from."""
        return self._backend.base

    @property
    def store(self) -> Path | None:
        """Where the branches are kept. Commands in branches have no business there."""
        return self._backend.store

    @property
    def fstype(self) -> str:
        """What presents the branches: "branchfs" or "overlay"."""
        return self._backend.fstype

    @property
    def owner(self) -> tuple[int, int]:
        """Uid and gid of the base directory's owner, to whom all files should belong."""
        return self._backend.owner

    @property
    def branch_path(self) -> str:
        """Its place in the tree of branches: `/main`, or that of the branch it was opened in."""
        return self._branch.branch_path if self._branch else "/main"

    def branch(
        self,
        name: str,
        on_success: OnSuccess = "commit",
        on_error: OnError = "abort",
        *,
        disk_limit: int | None = None,
    ) -> Branch:
        """Returns a branch of the workspace, which `with` opens and ends.

        A clean exit commits it, an exception aborts it and goes on. With `on_success=None` or
        `on_error=None` it is left open instead. It may add `disk_limit` bytes; above that writing
        in it fails with EDQUOT. Raises ValueError for an impossible name; nothing
        is made before `with`.
        """
        return Branch(
            self._backend,
            name,
            parent_id=self._branch.id if self._branch else MAIN_ID,
            parent_path=self.branch_path,
            on_success=on_success,
            on_error=on_error,
            disk_limit=disk_limit,
        )

    def reopen(self, name: str) -> Branch:
        """Returns the open branch of that name, to go on with it, commit it or abort it.

        Raises BranchNotFoundError when there is none.
        """
        for record in self._backend.branches():
            if record.name == name:
                return Branch.of(self._backend, record)
        raise BranchNotFoundError(
            f"no branch {name!r} is open in {self.root}",
            hint="branching ls lists them",
            branch=name,
        )

    def branches(self) -> list[BranchRecord]:
        """Lists the open branches at all depths, the oldest first."""
        return self._backend.branches()

    def close(self) -> None:
        """Closes the connections to the file system. The mount and its branches stay."""
        self._backend.close()

    def __repr__(self) -> str:
        return f"Workspace({str(self.path)!r})"


def _open(path: Path) -> Backend:
    mount = find_mount(path)
    if mount is not None:
        for backend in _BACKENDS:
            if backend.serves(mount):
                return backend(mount)
    raise MountError(
        f"{path} is not inside a mount that can be branched",
        hint="mount its directory first: branchfs mount --base DIR MOUNTPOINT",
        path=str(path),
    )


def find_mount(path: Path) -> Mount | None:
    """Returns the deepest mount around `path` that some backend serves."""
    for mount in mounts_around(path):
        if any(backend.serves(mount) for backend in _BACKENDS):
            return mount
    return None


def _branch_around(path: Path, backend: Backend) -> BranchRecord | None:
    """Returns the branch that `path` lies in: `/@outer/@inner/file` lies in `inner`."""
    place = Path(os.path.realpath(path))
    if not place.is_relative_to(backend.root):
        return None
    names = list(
        takewhile(lambda part: part.startswith("@"), place.relative_to(backend.root).parts)
    )
    if not names:
        return None
    name = names[-1].removeprefix("@")
    for branch in backend.branches():
        if branch.name == name:
            return branch
    raise BranchNotFoundError(f"{path} lies in no open branch", branch=name, path=str(path))
