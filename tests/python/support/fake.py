"""A stand-in for BranchFS: the control protocol over plain directories that are copied.

It is stricter than the real one: a request with a field that control.md does not name is refused,
so is one that lacks a field that the library must always send, and the files of a branch that
ended or is stale are removed immediately. It cannot freeze a parent's files.
"""

from __future__ import annotations

import json
import os
import shutil
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

_FIELDS = {
    "info": set[str](),
    "create": {"name", "parent"},
    "commit": {"branch", "force", "skip", "only", "exclude"},
    "rebase": {"branch", "force", "dry_run"},
    "abort": {"branch"},
    "list": set[str](),
    "diff": {"branch"},
}
_OPTIONAL = {
    "create": {"disk_limit"},
    "commit": {"policy", "rebase", "dry_run", "drop_rest"},
    "diff": {"stat"},
}


class Refusal(Exception):
    def __init__(self, kind: str, message: str, paths: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.reply = {"kind": kind, "message": message, "hint": None, "paths": list(paths)}


@dataclass
class FakeBranch:
    id: int
    name: str
    parent: int
    path: Path
    branch_path: str
    state: str = "live"
    disk_limit: int | None = None
    created: float = field(default_factory=time.time)


class FakeBranchFS:
    """One mount: `root` shows main, `root/@name` each branch."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lock = threading.Lock()
        self.open: dict[int, FakeBranch] = {}
        self.last_id = 0
        self.requests: list[dict[str, Any]] = []
        self.refuse_next: dict[str, Refusal] = {}
        """A verb's next request is answered with this instead."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        verb = request.pop("verb")
        if request.pop("v") != 1 or set(request) - _OPTIONAL.get(verb, set()) != _FIELDS[verb]:
            raise Refusal("usage", f"malformed {verb}: {request}")
        with self.lock:
            self.requests.append({"verb": verb, **request})
            if verb in self.refuse_next:
                raise self.refuse_next.pop(verb)
            reply: dict[str, Any] = getattr(self, f"_{verb}")(**request)
            return reply

    def _info(self) -> dict[str, Any]:
        owner = self.root.stat()
        return {
            "version": "0.2.0",
            "mountpoint": str(self.root),
            "base": str(self.root),
            "store": "",
            "driver": "fuse",
            "policy": "first-winner",
            "features": ["disk_limit", "drop_rest"],
            "pid": os.getpid(),
            "uid": owner.st_uid,
            "gid": owner.st_gid,
        }

    def _create(self, name: str, parent: int, disk_limit: int | None = None) -> dict[str, Any]:
        """Keeps the limit, and enforces none: only a file system could."""
        above = self._find(parent) if parent else None
        if above and above.state == "stale":
            raise Refusal("stale", f"{above.name} is stale")
        if any(branch.name == name for branch in self.open.values()):
            raise Refusal("exists", f"a branch named {name} is open")
        self.last_id += 1
        branch = FakeBranch(
            id=self.last_id,
            name=name,
            parent=parent,
            path=self.root / f"@{name}",
            branch_path=f"{above.branch_path if above else '/main'}/{name}",
            disk_limit=disk_limit,
        )
        branch.path.mkdir()
        _mirror(self._directory(parent), branch.path)
        self.open[branch.id] = branch
        return self._show(branch)

    def _commit(
        self,
        branch: int,
        only: list[str],
        exclude: list[str],
        dry_run: bool = False,
        drop_rest: bool = False,
        **_: object,
    ) -> dict[str, Any]:
        found = self._find(branch)
        if found.state == "stale":
            raise Refusal("conflict", f"a sibling of {found.name} was committed first")
        if self._live_children(branch):
            raise Refusal("frozen", f"{found.name} has live children")
        everything = self._changes(found)
        changes = [
            change
            for change in everything
            if (not only or any(fnmatch(change["path"], glob) for glob in only))
            and not any(fnmatch(change["path"], glob) for glob in exclude)
        ]
        if found.parent and (only or exclude):
            raise Refusal("unsupported", "paths can be chosen only in a commit into main")
        if everything and not changes:
            raise Refusal("usage", f"none of the paths that {found.name} changed are chosen")
        remaining = 0 if drop_rest else len(everything) - len(changes)
        reply = {"changes": changes, "stale": [], "forgotten": [], "remaining": remaining}
        if dry_run:
            return reply
        for change in changes:
            _carry(change["path"], found.path, self._directory(found.parent))
        if not remaining:
            self._forget(found)
        if not changes:
            return reply
        stale = [
            other
            for other in self.open.values()
            if other.parent == found.parent and other is not found
        ]
        for other in stale:
            self._make_stale(other)
        names = [other.name for other in stale]
        return {**reply, "stale": names}

    def _rebase(self, branch: int, force: bool, dry_run: bool) -> dict[str, Any]:
        """A branch that lost has lost its files here: only a live one can be rebased."""
        found = self._find(branch)
        if found.state == "stale":
            raise Refusal("conflict", f"branch {found.name} cannot be rebased", ("gone",))
        return {"conflicts": []}

    def _abort(self, branch: int) -> dict[str, Any]:
        self._forget(self._find(branch))
        return {}

    def _list(self) -> dict[str, Any]:
        return {"branches": [self._show(branch) for branch in self.open.values()]}

    def _diff(self, branch: int, **_: object) -> dict[str, Any]:
        return {"changes": self._changes(self._find(branch))}

    def _changes(self, branch: FakeBranch) -> list[dict[str, Any]]:
        before, after = _files(self._directory(branch.parent)), _files(branch.path)
        changed = {
            path: "deleted" if path not in after else "modified" if path in before else "added"
            for path in before | after
            if before.get(path) != after.get(path)
        }
        return [
            {"path": path, "change": change, "kind": "file"}
            for path, change in sorted(changed.items())
        ]

    def _find(self, branch_id: int) -> FakeBranch:
        if branch_id not in self.open:
            raise Refusal("not_found", f"no branch {branch_id}")
        return self.open[branch_id]

    def _live_children(self, branch_id: int) -> list[FakeBranch]:
        return [b for b in self.open.values() if b.parent == branch_id and b.state == "live"]

    def _make_stale(self, branch: FakeBranch) -> None:
        branch.state = "stale"
        shutil.rmtree(branch.path, ignore_errors=True)
        for child in [b for b in self.open.values() if b.parent == branch.id]:
            self._make_stale(child)

    def _forget(self, branch: FakeBranch) -> None:
        for child in [b for b in self.open.values() if b.parent == branch.id]:
            self._forget(child)
        del self.open[branch.id]
        shutil.rmtree(branch.path, ignore_errors=True)

    def _directory(self, branch_id: int) -> Path:
        return self._find(branch_id).path if branch_id else self.root

    def _show(self, branch: FakeBranch) -> dict[str, Any]:
        return {
            "id": branch.id,
            "name": branch.name,
            "parent": branch.parent,
            "path": str(branch.path),
            "branch_path": branch.branch_path,
            "state": branch.state,
            "frozen": bool(self._live_children(branch.id)),
            "created": branch.created,
            "disk_limit": branch.disk_limit,
            "disk_used": None if branch.disk_limit is None else 0,
            "disk_refusals": None if branch.disk_limit is None else 0,
        }


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # as many as come at once; the default of 5 makes them wait
    fake: FakeBranchFS


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        for line in self.rfile:
            try:
                reply = {"ok": self.server.fake.answer(json.loads(line))}
            except Refusal as refusal:
                reply = {"error": refusal.reply}
            try:
                self.wfile.write(json.dumps(reply).encode() + b"\n")
            except BrokenPipeError:
                return


@contextmanager
def serving(fake: FakeBranchFS, socket_path: Path) -> Iterator[None]:
    """Answers for `fake` at `socket_path`, and marks its root as a mount's."""
    os.setxattr(fake.root, "user.branchfs.control", os.fsencode(socket_path))
    with _Server(str(socket_path), _Handler) as server:
        server.fake = fake
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def mount_table_line(point: Path) -> bytes:
    """Returns the line by which the kernel would show a BranchFS mount at `point`."""
    escaped = os.fsencode(point).replace(b"\\", b"\\134").replace(b" ", b"\\040")
    return b"900 1 0:99 / " + escaped + b" rw shared:1 - fuse.branchfs branchfs rw\n"


def _carry(path: str, source: Path, target: Path) -> None:
    (target / path).unlink(missing_ok=True)
    if (source / path).exists():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / path, target / path)


def _mirror(source: Path, target: Path) -> None:
    for entry in target.iterdir():
        if not entry.name.startswith("@"):
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    for entry in source.iterdir():
        if entry.name.startswith("@"):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, target / entry.name, symlinks=True)
        else:
            shutil.copy2(entry, target / entry.name, follow_symlinks=False)


def _files(top: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(top)): path.read_bytes()
        for path in top.rglob("*")
        if path.is_file() and not path.relative_to(top).parts[0].startswith("@")
    }
