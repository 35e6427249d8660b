"""The backend for BranchFS: methods for the daemon's requests, exceptions for its errors."""

from __future__ import annotations

import errno
import os
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar, cast

from branching._linux.mountinfo import Mount, read_mounts
from branching.errors import (
    AbortError,
    BranchError,
    BranchingError,
    BranchNotFoundError,
    BranchStaleError,
    CommitError,
    ConflictError,
    MountError,
    RecoveryError,
)
from branching.fs.backend import (
    BranchRecord,
    Change,
    CommitRecord,
    Committed,
    Policy,
    Reversal,
    lease_line,
)
from branching.fs.control_client import ControlSocket, DaemonGone, Fields, RequestRefused

CONTROL_XATTR = "user.branchfs.control"
"""Extended attribute of the mount's root with the path of the control socket."""

IN_BRANCH = "BRANCHING"
"""Environment variable that is set for all commands in a branch."""

BUSY_SECONDS_MAX = 5.0
"""How long a commit waits for files that are still open for writing.

The kernel reports the last close of a file shortly after close() or exit() returned, so a branch
may still be busy after its last writer has ended.
"""
_BUSY_POLL_SECONDS = 0.005
ANSWER_SECONDS_MAX = 20.0
"""How long a daemon may take to answer which mount it serves. An idle machine needs about 1 ms."""

T = TypeVar("T")
Introduction = tuple[ControlSocket, Fields]
"""A connection to a daemon, and what it says of its mount."""


class NoAnswer(MountError):
    """The daemon of a mount does not answer."""


class BranchFS:
    """One BranchFS mount, used through its control socket."""

    def __init__(self, mount: Mount, introduction: Introduction | None = None) -> None:
        """Connects to the daemon of a mount.

        Args:
            mount: The mount.
            introduction: What `introduce` returned for it. Default: asks the daemon now, and waits
                at most `ANSWER_SECONDS_MAX`.

        Raises:
            MountError: The daemon is gone, or does not answer.
        """
        self._control, info = introduction or answered(
            mount.directory, lambda: self.introduce(mount)
        )
        self.root = Path(str(info["mountpoint"]))
        self.seen_at = self.root
        self.base = Path(str(info["base"]))
        self.store = Path(str(info["store"])) if info.get("store") else None
        self.policy = str(info.get("policy"))
        self.fstype = "overlay" if info.get("driver") == "overlay" else "branchfs"
        self.driver_reason = str(info.get("why_not") or "")
        self.owner = (_int(info["uid"]), _int(info["gid"]))
        features = info.get("features")
        self._features = features if isinstance(features, list) else []

    @staticmethod
    def introduce(mount: Mount) -> Introduction:
        """Connects to the daemon of a mount, and asks what it serves. Waits as long as it takes."""
        control = ControlSocket(_control_path(mount.directory))
        with _translated(MountError, "the workspace cannot be opened", mount.directory):
            return control, control.request("info", {})

    @staticmethod
    def serves(mount: Mount) -> bool:
        """Returns whether a mount has the type of BranchFS. The source name could be forged."""
        return mount.fstype == "fuse.branchfs"

    def check_call(self, *, is_nested: bool, is_part: bool, is_compared: bool) -> None:
        """Has all of it."""

    def create(
        self, name: str, parent: int, *, disk_limit: int | None = None, leases: int | None = None
    ) -> BranchRecord:
        what = f"branch {name!r} was not made"
        fields: Fields = {"name": name, "parent": parent}
        if disk_limit is not None:
            if "disk_limit" not in self._features:
                raise MountError(
                    f"{what}: the limit on disk cannot be enforced by the BranchFS of {self.root}",
                    hint="mount it with a newer branchfs, or leave the limit out",
                    branch=name,
                    limit="disk",
                )
            fields["disk_limit"] = disk_limit
        return self._created("create", what, fields, [], leases, feature="lease")

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
        fields: Fields = {"branch": branch.id, "force": force, "skip": skip}
        fields |= {"rebase": True} if rebase else {}
        fields |= {} if policy is None else {"policy": policy}
        fields |= {"dry_run": True} if dry_run else {}
        fields |= {"only": list(only), "exclude": list(exclude)}
        what = f"branch {branch.name!r} was not committed"
        if drop_rest:
            fields["drop_rest"] = True
        elif (skip or only or exclude) and "drop_rest" not in self._features:
            raise CommitError(
                f"{what}: the BranchFS of {self.root} would drop the paths that are not committed",
                hint="mount it with a newer branchfs, or drop them with drop_rest (--drop-rest)",
                branch=branch.name,
            )
        with _translated(CommitError, what, self.root, branch=branch.name):
            done = _patiently(lambda: self._control.request("commit", fields))
        forgotten = cast("list[Fields]", done.get("forgotten", []))
        return Committed(
            changes=_changes(done),
            forgotten=[str(entry["branch"]) for entry in forgotten],
            commit=cast("int | None", done.get("commit")),
            remaining=_int(done.get("remaining", 0)),
        )

    def rebase(
        self, branch: BranchRecord, *, force: bool = False, dry_run: bool = False
    ) -> list[str]:
        fields: Fields = {"branch": branch.id, "force": force, "dry_run": dry_run}
        what = f"branch {branch.name!r} was not rebased"
        with _translated(CommitError, what, self.root, branch=branch.name):
            done = _patiently(lambda: self._control.request("rebase", fields))
        return [str(path) for path in cast("list[object]", done["conflicts"])]

    def detached_mount(self, branch: BranchRecord) -> int | None:
        if self.fstype != "overlay" or "clone_mount" not in self._features:
            return None
        from branching._linux import fd_passing

        own, daemons = socket.socketpair()
        with own, daemons, _translated(MountError, "the branch cannot be mounted", self.root):
            self._control.request(
                "clone_mount", {"branch": branch.id}, descriptors=[daemons.fileno()]
            )
            _, (mount,) = fd_passing.receive(own)
        return mount

    def abort(self, branch: BranchRecord) -> None:
        what = f"branch {branch.name!r} was not dropped"
        with _translated(AbortError, what, self.root, branch=branch.name):
            try:
                self._control.request("abort", {"branch": branch.id})
            except RequestRefused as refused:
                if refused.kind != "not_found":  # gone is what was wanted
                    raise

    def diff(self, branch: BranchRecord, *, count_lines: bool = False) -> list[Change]:
        what = f"branch {branch.name!r} cannot be compared"
        fields: Fields = {"branch": branch.id, **({"stat": True} if count_lines else {})}
        with _translated(BranchError, what, self.root, branch=branch.name):
            return _changes(self._control.request("diff", fields))

    def patch(self, branch: BranchRecord, file: int) -> int:
        what = f"branch {branch.name!r} cannot be written as a patch"
        fields: Fields = {"branch": branch.id, "patch": True}
        with _translated(BranchError, what, self.root, branch=branch.name):
            return _int(self._control.request("diff", fields, descriptors=[file])["left_out"])

    def export(
        self, branch: BranchRecord, file: int, *, whole: bool = False, exclude: Sequence[str] = ()
    ) -> None:
        what = f"branch {branch.name!r} was not exported"
        fields: Fields = {"branch": branch.id}
        if whole or exclude:
            if "whole" not in self._features:
                raise BranchError(
                    f"{what}: the BranchFS of {self.root} writes changes only, and all of them",
                    hint="it is older than this library: mount with the current branchfs",
                    branch=branch.name,
                )
            fields |= {"whole": whole, "exclude": list(exclude)}
        with _translated(BranchError, what, self.root, branch=branch.name):
            self._control.request("export", fields, descriptors=[file])

    def load(
        self,
        name: str,
        parent: int,
        file: int,
        *,
        force: bool = False,
        leases: int | None = None,
    ) -> BranchRecord:
        what = f"branch {name!r} was not imported"
        fields: Fields = {"name": name, "parent": parent, "force": force}
        return self._created("import", what, fields, [file], leases, feature="import_lease")

    def _created(
        self,
        verb: str,
        what: str,
        fields: Fields,
        descriptors: list[int],
        leases: int | None,
        *,
        feature: str,
    ) -> BranchRecord:
        """Creates a branch. A daemon with the feature writes its lease before the branch exists."""
        is_leased_first = leases is not None and feature in self._features
        if leases is not None and is_leased_first:
            fields, descriptors = fields | {"lease": True}, [*descriptors, leases]
        with _translated(MountError, what, self.root, branch=str(fields["name"])):
            made = self._control.request(
                verb, fields, undo=self._drop_interrupted, descriptors=descriptors
            )
        record = _record(made)
        if not is_leased_first:
            _write_lease(leases, record)
        return record

    def history(self) -> list[CommitRecord]:
        with _translated(MountError, "the history cannot be listed", self.root):
            listed = self._control.request("history", {})
        return [_commit_record(entry) for entry in cast("list[Fields]", listed["entries"])]

    def newest_pruned(self) -> int:
        with _translated(MountError, "the history cannot be listed", self.root):
            return _int(self._control.request("history", {}).get("newest_pruned", 0))

    def commit_changes(self, commit: int) -> tuple[CommitRecord, list[Change]]:
        with _translated(CommitError, f"commit {commit} cannot be shown", self.root):
            done = self._control.request("show", {"commit": commit})
        return _commit_record(cast("Fields", done["entry"])), _changes(done)

    def undo(
        self, commit: int | None = None, *, force: bool = False, dry_run: bool = False
    ) -> Reversal:
        return self._reverse("undo", "nothing was undone", commit, force=force, dry_run=dry_run)

    def redo(
        self, commit: int | None = None, *, force: bool = False, dry_run: bool = False
    ) -> Reversal:
        return self._reverse("redo", "nothing was redone", commit, force=force, dry_run=dry_run)

    def _reverse(
        self, verb: str, what: str, commit: int | None, *, force: bool, dry_run: bool
    ) -> Reversal:
        fields: Fields = {"force": force, "dry_run": dry_run}
        if commit is not None:
            self.commit_changes(commit)  # refused by a daemon that would not heed the number
            fields["commit"] = commit
        with _translated(CommitError, what, self.root):
            try:
                done = _patiently(lambda: self._control.request(verb, fields))
            except RequestRefused as refused:
                if refused.kind != "not_found":
                    raise
                raise CommitError(
                    f"{what}: {refused.message}", hint="branching history lists the commits"
                ) from refused
        entry = _commit_record(cast("Fields", done["entry"]))
        return Reversal(commit=entry, changes=_changes(done))

    def prune(self, keep: int = 0) -> tuple[int, int]:
        with _translated(MountError, "nothing was pruned", self.root):
            done = self._control.request("prune", {"keep": keep})
        removed = done["removed"]
        count = len(removed) if isinstance(removed, list) else _int(removed)
        return count, _int(done["bytes"])

    def branches(self) -> list[BranchRecord]:
        with _translated(MountError, "the branches cannot be listed", self.root):
            listed = self._control.request("list", {})
        return [_record(entry) for entry in cast("list[Fields]", listed["branches"])]

    def close(self) -> None:
        self._control.close()

    def _drop_interrupted(self, made: Fields) -> None:
        self.abort(_record(made))


def read_control_path(root: Path | int) -> str:
    """Asks a mount's root, or a descriptor of it, for the control socket. OSError if it is none.

    Only BranchFS answers for the root of its file system. In any other directory, also in one of
    the file system that is mounted elsewhere, the attribute may be set by its owner.
    """
    point = root if isinstance(root, Path) else Path(f"/proc/self/fd/{root}").readlink()
    found = [mount for mount in read_mounts() if mount.directory == point]
    if not any(BranchFS.serves(mount) and mount.root == "/" for mount in found):
        raise OSError(errno.ENODATA, "no BranchFS is mounted there", str(point))
    return os.fsdecode(os.getxattr(root, CONTROL_XATTR))


def answered(root: Path, ask: Callable[[], T]) -> T:
    """Returns what `ask` returns, which waits for the daemon of the mount at `root`.

    Raises NoAnswer after `ANSWER_SECONDS_MAX`. What waits for a file system cannot be interrupted:
    it does so in a thread of its own, which is left behind then.
    """
    values: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            values.append(ask())
        except BaseException as error:  # raised again by the caller
            errors.append(error)

    thread = threading.Thread(target=work, name="asks a daemon", daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS_MAX)
    if errors:
        raise errors[0]
    if not values:
        raise NoAnswer(
            f"the BranchFS daemon of {root} does not answer (waited {ANSWER_SECONDS_MAX:g} s)",
            hint="it is stopped, or it hangs. End it (`ps -C branchfs -f` lists the daemons), and "
            f"unmount it: umount -l {shlex.quote(str(root))}. Its branches are kept in the store",
            path=str(root),
        )
    return values[0]


def sealed(root: Path) -> MountError:
    """What is to be said to a command in a sandbox that wants to branch."""
    return MountError(
        f"{root} is a branch, and this process is in its sandbox: branches cannot be created, "
        "committed or listed here",
        hint="run the outer command without a sandbox if it must create branches itself",
        path=str(root),
    )


def _control_path(root: Path) -> str:
    try:
        return read_control_path(root)
    except OSError as error:
        if error.errno in (errno.ENOTCONN, errno.ECONNABORTED):
            raise MountError(
                f"the BranchFS daemon of {root} is gone; its branches are kept in the store",
                hint=f"`branchfs log {_base_of(root)}` prints its log; unmount it "
                f"(umount -l {root}) and mount the base again",
                path=str(root),
            ) from error
        if IN_BRANCH in os.environ:
            raise sealed(root) from error
        raise MountError(
            f"the mount at {root} does not report its control socket: {error.strerror}",
            hint="only mounts made by `branchfs mount` (0.2 or later) can be used",
            path=str(root),
        ) from error


def _base_of(root: Path) -> str:
    """Returns the base of the mount at `root` from the mount table, quoted for a shell."""
    sources = [mount.source for mount in read_mounts() if mount.directory == root]
    return shlex.quote(sources[-1]) if sources and sources[-1].startswith("/") else "BASE"


_BY_KIND: dict[str, type[BranchingError]] = {
    "stale": BranchStaleError,
    "conflict": ConflictError,
    "not_found": BranchNotFoundError,
    "exists": BranchError,
    "frozen": BranchError,
}
"""Exceptions for error kinds of any request. Other kinds raise the exception of the method."""

_NOT_COMPLETED = ("incomplete", "in_doubt")
"""Error kinds after which changes may have been applied. After all others nothing was changed."""


@contextmanager
def _translated(
    failure: type[BranchingError], what: str, root: Path, *, branch: str | None = None
) -> Iterator[None]:
    """Translates errors of the daemon to exceptions: `failure` unless the kind is more specific."""
    try:
        yield
    except RequestRefused as refused:
        if refused.kind == "name":
            raise ValueError(refused.message) from refused
        if refused.kind in _NOT_COMPLETED:
            raise RecoveryError(
                refused.message, hint=refused.hint, branch=branch, path=refused.path
            ) from refused
        kind = _BY_KIND.get(refused.kind, failure)
        if issubclass(failure, CommitError):
            # A stale branch is a conflict; all other errors of a commit are commit errors.
            kind = ConflictError if kind in (BranchStaleError, ConflictError) else failure
            if refused.kind == "not_found":
                kind = BranchNotFoundError
        raise kind(
            f"{what}: {refused.message}",
            hint=refused.hint,
            branch=branch,
            path=refused.path,
            paths=refused.paths,
        ) from refused
    except DaemonGone as gone:
        kind = failure if failure is not BranchError else MountError
        state = "does not answer" if isinstance(gone.__cause__, BlockingIOError) else "is gone"
        raise kind(
            f"{what}: the BranchFS daemon of {root} {state} ({gone})",
            hint=f"`branchfs log {_base_of(root)}` prints its log. Mount the base again, or run "
            "the command again where it mounts by itself: live branches come back, and a "
            "commit that was interrupted is finished or rolled back",
            branch=branch,
            path=str(root),
        ) from gone


def _patiently(commit: Callable[[], Fields]) -> Fields:
    deadline = time.monotonic() + BUSY_SECONDS_MAX
    while True:
        try:
            return commit()
        except RequestRefused as refused:
            if refused.kind != "busy" or time.monotonic() >= deadline:
                raise
        time.sleep(_BUSY_POLL_SECONDS)


def _record(entry: Fields) -> BranchRecord:
    return BranchRecord(
        id=_int(entry["id"]),
        name=str(entry["name"]),
        parent=_int(entry["parent"]),
        path=Path(str(entry["path"])),
        branch_path=str(entry["branch_path"]),
        state=str(entry["state"]),
        frozen=bool(entry["frozen"]),
        created=float(cast("float", entry["created"])),
        disk_limit=cast("int | None", entry.get("disk_limit")),
        disk_used=cast("int | None", entry.get("disk_used")),
        disk_refusals=cast("int | None", entry.get("disk_refusals")),
        has_base_record=cast("bool | None", entry.get("has_base_record")),
    )


def _write_lease(leases: int | None, record: BranchRecord) -> None:
    """Adds the lease of a branch whose daemon is older than this library, and has not done it."""
    if leases is not None:
        with suppress(OSError):
            os.write(leases, lease_line(record.id, record.name).encode())


def _commit_record(entry: Fields) -> CommitRecord:
    undone = entry.get("undone")
    return CommitRecord(
        id=_int(entry["id"]),
        branch=str(entry["branch"]),
        committed=float(cast("float", entry["committed"])),
        undone=None if undone is None else float(cast("float", undone)),
        changes=_int(entry["changes"]),
        bytes=_int(entry["bytes"]),
    )


def _changes(reply: Fields) -> list[Change]:
    return [
        Change(
            path=str(entry["path"]),
            change=str(entry["change"]),
            kind=str(entry["kind"]),
            origin=cast("str | None", entry.get("from")),
            lines=_lines(entry.get("lines")),
            aspects=tuple(cast("list[str]", entry.get("aspects", []))),
        )
        for entry in cast("list[Fields]", reply["changes"])
    ]


def _lines(counted: object) -> tuple[int, int] | None:
    if not isinstance(counted, dict):
        return None
    return _int(counted["added"]), _int(counted["removed"])


def _int(value: object) -> int:
    return int(cast("int", value))
