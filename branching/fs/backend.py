"""The interface between a branching file system and the library.

A backend object represents one mount. Each backend is a module with a class that implements this
interface (`branchfs.py`, `daxfs.py`) and an entry in the registry of `workspace.py`. All methods
are safe to call from any thread and after a fork, and raise exceptions of `branching.errors` only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

Policy = Literal["first-winner", "snapshot", "serializable"]
"""The rule for the siblings of a branch when it is committed.

first-winner    siblings become stale
snapshot        siblings stay live; each can be committed if it wrote no path committed since
serializable    as snapshot, and the sibling must not have read such a path either
"""
Driver = Literal["auto", "fuse", "overlay"]
"""The driver that presents branches as directories."""

MAIN_ID = 0
"""The id of the root branch, whose content is the base directory."""


@dataclass(frozen=True, kw_only=True)
class BranchRecord:
    """An open branch, as the file system reports it."""

    id: int
    """Number of the branch. It is never reused, unlike the name."""
    name: str
    parent: int
    """Id of the parent; `MAIN_ID` is the workspace itself."""
    path: Path
    """Directory that shows the branch."""
    branch_path: str
    """Path in the tree of branches: `/main/outer/inner`."""
    state: str
    """"live" or "stale"."""
    frozen: bool
    """True if the branch has live children and therefore refuses writes."""
    created: float
    """Unix time."""
    disk_limit: int | None = None
    """Maximum number of bytes that the branch may add; None for no limit."""
    disk_used: int | None = None
    """Bytes that the branch has added; None if neither it nor an ancestor has a limit."""
    disk_refusals: int | None = None
    """Number of changes in the branch that the limit refused (EDQUOT)."""
    has_base_record: bool | None = None
    """For a branch just loaded: whether its archive records the state it was made against."""


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
    """Former path of a renamed object."""
    lines: tuple[int, int] | None = None
    """Number of lines added and removed; None if they were not counted."""
    aspects: tuple[str, ...] = ()
    """How an existing object differs: "content", "mode", "owner", "xattrs", "times"."""
    privileges: tuple[str, ...] = ()
    """Rights that an added or changed file gives to every user who executes it: "set-user-ID",
    "set-group-ID", "capabilities". Set only for commits to the workspace itself."""


PRIVILEGE_WARNINGS_MAX = 10
"""Where people or models read the warnings; JSON documents have all."""


def privilege_warnings(changes: Iterable[Change], count_max: int | None = None) -> list[str]:
    """Returns a warning for each committed file that gives rights to users who execute it.

    Args:
        changes: The committed changes.
        count_max: Maximum number of files to name. One more warning then gives the number of
            files left out. Default: no maximum.

    Returns:
        The warnings, in the order of the changes.
    """
    warnings = [
        f"warning: the commit has {change.path!r} with {' and '.join(change.privileges)}: users "
        "who execute it get rights of its owner or group"
        for change in changes
        if change.privileges
    ]
    if count_max is not None and len(warnings) > count_max:
        left_out = len(warnings) - count_max
        warnings[count_max:] = [f"warning: {left_out} more files with such rights"]
    return warnings


@dataclass(frozen=True, kw_only=True)
class DiffSummary:
    """Number of paths that a branch changed, by kind of change."""

    added: int = 0
    modified: int = 0
    """Paths changed in content, type, mode, owner, times or attributes."""
    deleted: int = 0
    renamed: int = 0

    @staticmethod
    def of(changes: Iterable[Change]) -> DiffSummary:
        """Counts `changes` by kind."""
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
        """Short form, such as `+2 ~1 -1 >1` (added, modified, deleted, renamed), or `none`."""
        counts = zip("+~->", vars(self).values(), strict=True)
        return " ".join(f"{mark}{count}" for mark, count in counts if count) or "none"

    @staticmethod
    def parse(text: str) -> DiffSummary:
        """Parses the output of `str()`. For any other text all counts are 0."""
        pairs = (part.split(" ") for part in text.split(", "))
        counts = {pair[1]: int(pair[0]) for pair in pairs if len(pair) == 2 and pair[0].isdecimal()}
        known = ("added", "modified", "deleted", "renamed")
        return DiffSummary(**{kind: count for kind, count in counts.items() if kind in known})

    def __str__(self) -> str:
        """Returns a text such as `2 added, 1 deleted`, or `no changes`."""
        counts = vars(self).items()
        return ", ".join(f"{count} {kind}" for kind, count in counts if count) or "no changes"


@dataclass(frozen=True, kw_only=True)
class CommitRecord:
    """A commit to the workspace itself, as recorded in its history."""

    id: int
    branch: str
    """Name of the branch that was committed."""
    committed: float
    """Unix time."""
    undone: float | None
    """Unix time of the undo; None if the commit was not undone."""
    changes: int
    """Number of paths that the commit changed."""
    bytes: int
    """Disk space of the history entry, in bytes."""


@dataclass(frozen=True, kw_only=True)
class Reversal:
    """The result of an undo or a redo, or of its dry run."""

    commit: CommitRecord
    changes: list[Change]
    """Changes to the workspace."""


class Committed(NamedTuple):
    """The result of a commit, or of its dry run."""

    changes: list[Change]
    """Paths changed in the parent."""
    forgotten: list[str]
    """Branch names of earlier commits that can no longer be undone because of this commit."""
    commit: int | None = None
    """Id of the commit in the history; None if it cannot be undone."""
    remaining: int = 0
    """Number of changed paths that were not committed. If it is not 0, the branch stays open with
    these paths; otherwise it is closed."""


class Backend(Protocol):
    """One mount of a branching file system."""

    seen_at: Path
    """The path at which commands in a branch see the workspace."""

    @property
    def root(self) -> Path:
        """The mount point, which shows main."""

    @property
    def base(self) -> Path:
        """The base directory, as the file system itself names it."""

    @property
    def store(self) -> Path | None:
        """The store directory; None if the branches are not stored in a directory."""

    @property
    def policy(self) -> str:
        """The mount's policy, used by commits that do not set another."""

    @property
    def fstype(self) -> str:
        """The file system that presents the branches: "branchfs", "overlay" or "daxfs"."""

    @property
    def driver_reason(self) -> str:
        """The reason why this file system presents the branches."""

    @property
    def owner(self) -> tuple[int, int]:
        """Uid and gid of the base directory's owner."""

    def check_call(self, *, is_nested: bool, is_part: bool, is_compared: bool) -> None:
        """Checks that the file system supports the operations that a call needs at its end.

        Args:
            is_nested: The call creates nested branches.
            is_part: The call commits a part of the changed paths.
            is_compared: The call lists the changed paths.

        Raises:
            MountError: One of them is not supported.
        """

    def create(
        self, name: str, parent: int, *, disk_limit: int | None = None, leases: int | None = None
    ) -> BranchRecord:
        """Creates a branch of `parent`.

        Args:
            name: Name of the new branch.
            parent: Id of the parent.
            disk_limit: Maximum number of bytes that the branch may add.
            leases: Descriptor of a file to which the line `+ID NAME` of the branch is added, before
                the branch exists if the file system can do that.

        Raises:
            BranchStaleError: The parent is stale.
            MountError: The branch could not be created.
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
        """Applies the branch to its parent, all or nothing; see `Branch.commit`.

        If `only`, `exclude` or `skip` leave changed paths, the branch stays open with them, unless
        `drop_rest` is set.

        Raises:
            ConflictError: A sibling was committed first, or the parent has other changes to the
                same paths.
            CommitError: The file system refused the commit.
        """

    def rebase(
        self, branch: BranchRecord, *, force: bool = False, dry_run: bool = False
    ) -> list[str]:
        """Forks the branch again from its parent's present state and keeps its changes.

        Returns:
            The conflicting paths of which `force` kept the branch's version.

        Raises:
            ConflictError: Branch and parent changed the same paths.
            CommitError: The file system refused the rebase.
        """

    def detached_mount(self, branch: BranchRecord) -> int | None:
        """Returns a descriptor of a detached mount of a branch; None if none is needed."""

    def abort(self, branch: BranchRecord) -> None:
        """Drops the branch and its children. Does nothing if the branch no longer exists."""

    def diff(self, branch: BranchRecord, *, count_lines: bool = False) -> list[Change]:
        """Returns the changes of the branch, sorted by path."""

    def patch(self, branch: BranchRecord, file: int) -> int:
        """Writes the changes of the branch to a descriptor, as a patch.

        Returns:
            The number of changes that a patch cannot represent.
        """

    def export(
        self, branch: BranchRecord, file: int, *, whole: bool = False, exclude: Sequence[str] = ()
    ) -> None:
        """Writes the layer of the branch to a descriptor, as an archive.

        With `whole`, the archive has all that the branch shows. Paths that match `exclude` are left
        out.
        """

    def load(
        self,
        name: str,
        parent: int,
        file: int,
        *,
        force: bool = False,
        leases: int | None = None,
    ) -> BranchRecord:
        """Creates a branch from an archive. If it fails, no branch is created.

        Args:
            name: Name of the new branch.
            parent: Id of the parent.
            file: Descriptor of the archive.
            force: Load the archive even if the parent has changed since it was made.
            leases: As for `create`.

        Raises:
            ConflictError: The parent has changed since the archive was made.
        """

    def history(self) -> list[CommitRecord]:
        """Returns the commits to main that can be undone or redone, oldest first."""

    def newest_pruned(self) -> int:
        """Returns the id of the newest commit that was removed from the history, 0 if none was.

        Commits that were undone before do not count.
        """

    def commit_changes(self, commit: int) -> tuple[CommitRecord, list[Change]]:
        """Returns a commit of the history with its changes. CommitError if it is missing."""

    def undo(
        self, commit: int | None = None, *, force: bool = False, dry_run: bool = False
    ) -> Reversal:
        """Undoes the last commit to main, all or nothing; see `Workspace.undo`."""

    def redo(
        self, commit: int | None = None, *, force: bool = False, dry_run: bool = False
    ) -> Reversal:
        """Redoes the last undone commit, all or nothing; see `Workspace.redo`."""

    def prune(self, keep: int = 0) -> tuple[int, int]:
        """Removes all but the newest `keep` history entries.

        Returns:
            The number of removed entries and their size in bytes.
        """

    def branches(self) -> list[BranchRecord]:
        """Returns the open branches, oldest first."""

    def close(self) -> None:
        """Closes the connections. A later call opens new ones. The mount stays."""


def lease_line(number: int, name: str) -> str:
    """Returns the line of a branch in a file of leases (`branch_leases`)."""
    return f"+{number} {name}\n"
