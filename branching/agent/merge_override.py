"""Reverts an automatic merge and merges another branch of the fork instead.

Before the merge, the parent's branch and each loser are exported to archives:

    HOME/<fork id>/override.json    the list of the archives and their owners; written last
                   <branch id>      the archive of a loser; `parent` has the parent's changes
                   before, after, between   if the place is a branch: its archives

HOME is beside the state of the forks, so that another process can override too. If that state is in
memory, HOME is a temporary directory. The last merge of each place can be overridden, as long as
the files have not changed since. The other branch is loaded on top of the parent's changes, and
both are committed at once. If the process dies meanwhile, the files are in the state before the
merge or after the new one, and the override can be repeated. All functions block.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from branching.agent.branch_runtime import BranchRuntime
from branching.agent.changed_paths import touched
from branching.agent.checkpoint import TreeMark
from branching.agent.errors import ForkStateError, ForkStoreError, MergeConflictError
from branching.agent.fork import Fork
from branching.agent.fork_files import report_of
from branching.agent.merge import is_newer
from branching.agent.parent_workspace import ParentWorkspace
from branching.agent.types import FlushReport
from branching.errors import BranchingError, ConflictError
from branching.fs import Branch, Workspace
from branching.fs.confined_dir import ConfinedDir

RECORD = "override.json"
_PARENT, _BEFORE, _AFTER, _BETWEEN = "parent", "before", "after", "between"


@dataclass(kw_only=True)
class _Record:
    """What is known beside the archives."""

    winner: str
    place: str | None
    forked_ns: int
    parents: list[str]
    touched: dict[str, list[str]] = field(default_factory=dict)
    commits: dict[str, int | None] = field(default_factory=dict)
    """If the place is main: the newest commit before and after the merge. `between` is set while
    another branch replaces the winner."""


class Override:
    """What it takes to change the outcome of one merge."""

    def __init__(self, fork_id: str, place: ParentWorkspace, home: Path, record: _Record) -> None:
        self.fork_id = fork_id
        self._place = place
        self._home = home
        self._record = record

    @classmethod
    def prepare(cls, fork: Fork, winner: BranchRuntime, home: Path | None) -> Override:
        """The merge begins; `home` is where overrides are kept. BranchError if a branch cannot be
        kept, ForkStoreError if nothing can be written: then nothing is merged."""
        files, place = fork.files, fork.place
        assert files is not None, "a fork without files commits nothing"
        assert place is not None, "files have a place"
        record = _Record(
            winner=winner.id,
            place=place.name,
            forked_ns=files.forked_ns,
            parents=sorted(files.parent_touched()),
        )
        made = cls(fork.fork_id, place, _new_home(home, fork), record)
        if home is None:  # it goes with the process
            weakref.finalize(made, shutil.rmtree, made._home, ignore_errors=True)
        try:
            made._keep_mark(_BEFORE)
            made._export(_PARENT, files.parent)
            for branch in fork.branches.values():
                if branch.branch is None:
                    continue
                tree = files.tree(branch.branch)
                record.touched[branch.id] = sorted(touched(branch.branch.diff(), files.base, tree))
                if branch is not winner:
                    made._export(branch.id, branch.branch)
        except OSError as error:
            made.forget()
            raise ForkStoreError(
                f"the state for an override cannot be saved: {error}",
                hint=(
                    'nothing was merged; merge with "pick:<branch id>", which saves no such state'
                ),
                path=str(made._home),
            ) from error
        except BaseException:
            made.forget()
            raise
        return made

    @classmethod
    def find(
        cls, fork_id: str, place: ParentWorkspace | None, home: Path | None
    ) -> Override | None:
        """Returns the override of a fork's merge, which another process may have recorded."""
        if place is None or home is None:
            return None
        try:
            record = _Record(**json.loads((home / fork_id / RECORD).read_text()))
        except FileNotFoundError:
            return None
        except (OSError, TypeError, ValueError) as error:
            raise ForkStoreError(
                f"the saved state for an override cannot be read: {error}", path=str(home)
            ) from error
        return cls(fork_id, place, home / fork_id, record)

    def settle(self) -> bool:
        """Records the commit of the winner. Returns False if the merge cannot be overridden."""
        try:
            self._keep_mark(_AFTER)
            self._save()
        except (BranchingError, OSError) as error:
            self.forget()
            warnings.warn(f"this merge cannot be overridden: {error}", stacklevel=2)
            return False
        return True

    def take(self, branch_id: str) -> FlushReport:
        """Restores the files from before the merge, and merges the files of the branch."""
        place, record = self._place, self._record
        if branch_id == record.winner:
            raise ForkStateError(f"branch {branch_id} is the merged branch")
        if not (self._home / branch_id).exists():
            raise ForkStateError(f"branch {branch_id} has no files of its own")
        name = f"{self.fork_id}.override"
        for cut_off in (f"{name}.branch", name):
            place.drop(cut_off)  # a process died in it
        now, before = place.mark(), self._mark(_BEFORE)
        assert before is not None, "it was kept before the merge"
        # The merge may have been undone already: by the user, or by an interrupted override.
        if now not in (self._mark(_AFTER), before, self._mark(_BETWEEN)):
            raise ConflictError("files were changed since the merge: it cannot be reverted")
        self._check(branch_id)
        if now == self._mark(_AFTER):
            place.restore(before)
        try:
            self._keep_mark(_BETWEEN)
            self._save()
            return self._land(name, branch_id)
        except BaseException:
            place.restore(now)
            raise

    def forget(self) -> None:
        """Removes the archives."""
        shutil.rmtree(self._home, ignore_errors=True)

    def _land(self, name: str, branch_id: str) -> FlushReport:
        with (self._home / _PARENT).open("rb") as parents:
            own = self._place.workspace.load(name, parents)
        try:
            with Workspace(own.path) as inside, (self._home / branch_id).open("rb") as archive:
                # `_check` has compared the branch's paths.
                changes = inside.load(f"{name}.branch", archive, force=True).commit()
            return report_of(changes, landed=own.commit(policy=self._place.policy))
        except BaseException:
            own.abort()
            raise

    def _check(self, branch_id: str) -> None:
        """Raises an error if the parent or others changed the base since the fork."""
        mine = set(self._record.touched[branch_id])
        others = mine.intersection(self._record.parents)
        workspace = self._place.workspace
        if self._place.branch is None:
            base = ConfinedDir(self._place.path, workspace.owner)
            for path in mine.difference(self._record.touched[self._record.winner]):
                if is_newer(path, workspace.base, self._record.forked_ns, base):
                    others.add(path)
        if others:
            raise MergeConflictError(
                f"nothing was changed: others changed {len(others)} of the branch's paths",
                paths=tuple(sorted(others)),
            )

    def _keep_mark(self, moment: str) -> None:
        mark = self._place.mark()
        self._record.commits[moment] = mark.commit_id
        if mark.archive is not None:
            (self._home / moment).write_bytes(mark.archive)

    def _mark(self, moment: str) -> TreeMark | None:
        if moment not in self._record.commits:
            return None
        archive = self._home / moment
        return TreeMark(
            branch=self._record.place,
            archive=archive.read_bytes() if archive.exists() else None,
            commit_id=self._record.commits[moment],
        )

    def _export(self, name: str, branch: Branch) -> None:
        with (self._home / name).open("xb") as archive:
            branch.export(archive)

    def _save(self) -> None:
        new = self._home / f"{RECORD}.new"
        new.write_text(json.dumps(asdict(self._record)))
        new.replace(self._home / RECORD)


def kept(home: Path) -> Iterator[tuple[str, str | None]]:
    """Returns the recorded overrides: the fork's id, and the name of the forked branch or main."""
    for record in sorted(home.glob(f"*/{RECORD}")):
        yield record.parent.name, json.loads(record.read_text())["place"]


def _new_home(home: Path | None, fork: Fork) -> Path:
    if home is None:
        return Path(tempfile.mkdtemp(prefix="branching-override-"))
    made = home / fork.fork_id
    shutil.rmtree(made, ignore_errors=True)  # of a merge that came to nothing
    made.mkdir(parents=True, mode=0o700)
    if fork.place is not None and os.geteuid() == 0:
        for directory in (home, made):
            os.chown(directory, *fork.place.workspace.owner)
    return made
