"""What a branching file system must offer: the whole interface between it and the library.

A backend speaks for one mount. Each is a file with such a class (`branchfs.py`, `daxfs.py`) and an
entry in the registry of `workspace.py`. All calls are safe from any
thread and after a fork, and raise exceptions of `branching.errors` only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

Policy = Literal["first-winner", "snapshot", "serializable"]
"""What a commit means for the siblings of the branch.

first-winner    they have lost: they are stale
snapshot        they live on, and can be committed if they wrote no path that was committed since
serializable    the same, and if they read no such path either
"""
Driver = Literal["auto", "fuse", "overlay"]
"""What presents the branches as directories."""

MAIN_ID = 0
"""The id of the root branch, whose content is the base directory."""


@dataclass(frozen=True, kw_only=True)
class BranchRecord:
    """What the file system knows of an open branch."""

    id: int
    """Never reused, unlike the name."""
    name: str
    parent: int
    """Id of the parent; `MAIN_ID` is the workspace itself."""
    path: Path
    """The branch as a directory."""
    branch_path: str
    """Its place in the tree of branches: `/main/outer/inner`."""
    state: str
    """"live" or "stale"."""
    frozen: bool
    """It has live children, and so cannot be written to."""
    created: float
    """Unix time."""
    disk_limit: int | None = None
    """Bytes that it may add, if that is limited."""
    disk_used: int | None = None
    """Bytes that it has added; None where neither it nor a branch above it is limited."""
    disk_refusals: int | None = None
    """How often a change in it was refused for that (EDQUOT)."""
    has_base_record: bool | None = None
    """Of a branch just loaded: whether its archive says what it was made against."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One path that differs between a branch and its parent."""

    path: str
    """Relative to the workspace."""
    change: str
    """"added", "modified", "deleted", "renamed", "type" or "metadata"."""
    kind: str
    """"file", "directory", "symlink" or "other"."""
    origin: str | None = None
    """Where a renamed path was before."""
    lines: tuple[int, int] | None = None
    """How many lines were added and removed, where they were counted."""
    aspects: tuple[str, ...] = ()
    """In what it differs if it was there: "content", "mode", "owner", "xattrs", "times"."""
    privileges: tuple[str, ...] = ()
    """Of a file that a commit to the workspace added or changed, and that gives rights of its owner
    or group to all who execute it: "set-user-ID", "set-group-ID", "capabilities"."""


def privilege_warnings(changes: Iterable[Change], count_max: int | None = None) -> list[str]:
    """Returns what to say of committed files that give rights to those who execute them: one text
    a file, and, of more than `count_max` files, how many are left out."""
    warnings = [
        f"warning: the commit has {change.path!r} with {' and '.join(change.privileges)}: "
        "whoever executes it gets rights of its owner or group"
        for change in changes
        if change.privileges
    ]
    if count_max is not None and len(warnings) > count_max:
        left_out = len(warnings) - count_max
        warnings[count_max:] = [f"warning: {left_out} more files with such rights"]
    return warnings


@dataclass(frozen=True, kw_only=True)
class DiffSummary:
    """How many paths a branch changed, by kind of change."""

    added: int = 0
    modified: int = 0
    """In content, type, mode, owner, times or attributes."""
    deleted: int = 0
    renamed: int = 0

    @staticmethod
    def of(changes: Iterable[Change]) -> DiffSummary:
        """Counts the changes."""
        counts = {"added": 0, "modified": 0, "deleted": 0, "renamed": 0}
        for change in changes:
            counts[change.change if change.change in counts else "modified"] += 1
        return DiffSummary(**counts)

    @property
    def total(self) -> int:
        """The number of changed paths."""
        return self.added + self.modified + self.deleted + self.renamed

    @property
    def short(self) -> str:
        """`+2 ~1 -1 >1`: added, modified, deleted, renamed; `none` for no changes."""
        counts = zip("+~->", vars(self).values(), strict=True)
        return " ".join(f"{mark}{count}" for mark, count in counts if count) or "none"

    @staticmethod
    def parse(text: str) -> DiffSummary:
        """Reads what `str` returns; of another text nothing is counted."""
        pairs = (part.split(" ") for part in text.split(", "))
        counts = {pair[1]: int(pair[0]) for pair in pairs if len(pair) == 2 and pair[0].isdecimal()}
        known = ("added", "modified", "deleted", "renamed")
        return DiffSummary(**{kind: count for kind, count in counts.items() if kind in known})

    def __str__(self) -> str:
        """`2 added, 1 deleted`, or `no changes`."""
        counts = vars(self).items()
        return ", ".join(f"{count} {kind}" for kind, count in counts if count) or "no changes"


@dataclass(frozen=True, kw_only=True)
class CommitRecord:
    """A commit to the workspace itself that is kept in its history."""

    id: int
    branch: str
    """Name of the branch that was committed."""
    committed: float
    """Unix time."""
    undone: float | None
    """When it was taken back; None if it stands."""
    changes: int
    """How many paths it changed."""
    bytes: int
    """What keeping it takes on disk."""


@dataclass(frozen=True, kw_only=True)
class Reversal:
    """What an undo did, or a redo; or would do."""

    commit: CommitRecord
    changes: list[Change]
    """What it changed in the workspace."""


@dataclass(frozen=True, kw_only=True)
class Committed:
    """The result of a commit, or of its dry run."""

    changes: list[Change]
    """The paths that it changed in the parent."""
    forgotten: list[str]
    """Branch names of the earlier commits that can no longer be undone because of it."""
    remaining: int = 0
    """How many changed paths were not committed. The branch stays open with them; with 0 it is
    closed."""


class Backend(Protocol):
    """One mount of a branching file system."""

    seen_at: Path
    """The path at which commands in a branch see the workspace."""

    @property
    def root(self) -> Path:
        """The mount's own directory, which shows the main branch."""

    @property
    def base(self) -> Path:
        """The directory that is branched, as the file system itself names it."""

    @property
    def store(self) -> Path | None:
        """Where the branches are kept, if that is a directory."""

    @property
    def policy(self) -> str:
        """What a commit means for the siblings of the branch, unless it says otherwise."""

    @property
    def fstype(self) -> str:
        """What presents the branches: "branchfs", "overlay", "daxfs"."""

    @property
    def driver_reason(self) -> str:
        """Why that presents them, and not something else."""

    @property
    def owner(self) -> tuple[int, int]:
        """Uid and gid of the base directory's owner."""

    def check_call(self, *, is_nested: bool, is_part: bool, is_compared: bool) -> None:
        """Raises MountError if the file system cannot do what a call will need at its end: branches
        in branches, the commit of a part of the changed paths, the list of them.
        """

    def create(self, name: str, parent: int, *, disk_limit: int | None = None) -> BranchRecord:
        """Forks `parent`; the branch may add so many bytes. BranchStaleError if the parent is
        stale, MountError if it cannot be done.
        """

    def commit(
        self,
        branch: BranchRecord,
        *,
        force: bool = False,
        skip: bool = False,
        only: Sequence[str] = (),
        exclude: Sequence[str] = (),
        drop_rest: bool = False,
        policy: Policy | None = None,
        rebase: bool = False,
        dry_run: bool = False,
    ) -> Committed:
        """Applies the branch to its parent, all or nothing. CommitError or ConflictError if not.

        The branch stays open with what `only`, `exclude` and `skip` leave, unless `drop_rest`.
        """

    def rebase(
        self, branch: BranchRecord, *, force: bool = False, dry_run: bool = False
    ) -> list[str]:
        """Forks the branch anew from its parent's present state and keeps its changes.

        Returns the conflicting paths that `force` decided. ConflictError or CommitError if not.
        """

    def abort(self, branch: BranchRecord) -> None:
        """Drops the branch and its children. One that is gone already is no error."""

    def diff(self, branch: BranchRecord, *, count_lines: bool = False) -> list[Change]:
        """Lists what the branch changed, by path."""

    def patch(self, branch: BranchRecord, file: int) -> int:
        """Writes what the branch changed as a patch; returns how many changes it cannot say."""

    def export(self, branch: BranchRecord, file: int) -> None:
        """Writes the branch's layer as an archive."""

    def load(self, name: str, parent: int, file: int, *, force: bool = False) -> BranchRecord:
        """Creates a branch from an archive, or nothing. ConflictError where the parent has changed
        since the archive was made, unless `force`.
        """

    def history(self) -> list[CommitRecord]:
        """Lists the commits to main that can be taken back or made again, the oldest first."""

    def undo(self, *, force: bool = False, dry_run: bool = False) -> Reversal:
        """Takes the last commit to main back, all or nothing. CommitError or ConflictError."""

    def redo(self, *, force: bool = False, dry_run: bool = False) -> Reversal:
        """Makes the commit that was undone last again. CommitError or ConflictError."""

    def prune(self, keep: int = 0) -> tuple[int, int]:
        """Forgets all but the newest `keep` commits; returns how many, and their bytes."""

    def branches(self) -> list[BranchRecord]:
        """Lists the open branches, the oldest first."""

    def close(self) -> None:
        """Gives back connections; a later call opens new ones. The mount stays."""
