"""Reads the state of a workspace: its branches, and the candidates whose logs are kept.

A WorkspaceMonitor polls in its own thread and passes each `Snapshot` to a function. One poll costs
a request to the daemon and a stat for each log. Only changed logs are read again, and only the end
of a long output. The changes of the branches are listed in turn, for at most 0.1 s per poll.

Two sources are joined by the branch name: the filesystem has the open branches, the run log has the
candidates, their calls and results. A branch without a log entry was created by a program without a
run log. An entry without a branch belongs to a branch that has ended.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from branching._caller import for_caller
from branching.errors import BranchingError
from branching.fs import BranchRecord, DiffSummary, Workspace
from branching.fs.branch_leases import orphaned_branches
from branching.fs.store_files import open_file
from branching.runlog.control_socket import is_alive
from branching.runlog.patches import read_patch
from branching.runlog.run_log import UNDER_WAY, Entry, read_entry
from branching.tui.diff.patch_sources import PatchSource

LOOK_SECONDS = 0.5
"""Poll interval, short enough to seem immediate."""
OUTPUT_BYTES_MAX = 64 << 10
"""Of an output so much is shown; `branching log` has it all."""
OUTPUT_LINES_MAX = 500
"""Maximum number of new lines to show per poll, because drawing takes time."""
LAST_LINE_BYTES_MAX = 1 << 10
"""So much of a log is read for its last line."""
DOOR_SECONDS = 2.0
"""How often a call that looks alive is asked whether it is."""
FINISHED_MAX = 20
"""So many candidates whose branches are gone are shown, the newest."""
ASKING_SECONDS_MAX = 0.1
"""For what branches have changed, each look: many branches must not slow it."""


@dataclass(frozen=True, kw_only=True)
class BranchView:
    """One branch, or the log of a branch that has ended."""

    name: str
    depth: int
    """How many branches are around it."""
    state: str
    """"open" without a log, "stale", "lost" (the program that tried it is gone), or the entry's."""
    record: BranchRecord | None = None
    entry: Entry | None = None
    is_dropped_next: bool = False
    """An MCP server that was killed has left it: the next one drops it."""
    seconds: float = 0.0
    changes: str = ""
    """`+2 ~1`; "" while that is not known."""
    last_line: str = ""
    """The last line that it printed."""
    has_patch: bool = False
    """The branch is gone, and its patch is kept."""

    @property
    def group(self) -> str:
        """The call that it belongs to, if the call has several candidates; else ""."""
        is_candidate = self.depth == 0 and self.entry is not None and self.entry.index >= 0
        return self.entry.call if is_candidate and self.entry is not None else ""

    @property
    def label(self) -> str:
        """What is tried in it, as far as that is known."""
        return self.entry.label if self.entry else ""

    @property
    def is_running(self) -> bool:
        """Something runs in it, or is paused."""
        return self.state in UNDER_WAY

    @property
    def is_shown_by_patch(self) -> bool:
        """Its files cannot be read: it is gone, with a kept patch, or it is stale."""
        return self.has_patch or self.state == "stale"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What was seen at one moment."""

    views: tuple[BranchView, ...] = ()
    """The branches as a tree, parents before children; the candidates of a call together, in their
    order, also those that are gone."""
    commits: int = 0
    """How many commits can be undone."""
    error: str = ""
    """Why the last poll failed, or None. The other fields then have the previous state."""

    def find(self, name: str) -> BranchView | None:
        """Returns the branch of that name."""
        return next((view for view in self.views if view.name == name), None)


@dataclass(frozen=True, kw_only=True)
class Output:
    """A piece of what the chosen branch printed."""

    name: str
    is_first: bool
    """It is the first piece since the branch was chosen; what came before is left out."""
    lines: tuple[str, ...]
    is_kept: bool = True
    """False: no output of it is kept."""


class WorkspaceMonitor:
    """Looks at a workspace until it is closed."""

    def __init__(
        self,
        space: Workspace,
        on_look: Callable[[Snapshot], object],
        on_output: Callable[[Output], object],
    ) -> None:
        self._space = space
        self._logs = None if space.store is None else space.store / "logs"
        self._on_look = on_look
        self._on_output = on_output
        self._woken = threading.Event()
        self._is_closed = False
        self._chosen = ""
        self._tail: Tail | None = None
        self._snapshot = Snapshot()
        self._began = time.time()
        self._entries: dict[str, tuple[int, Entry]] = {}
        self._control_servers: dict[str, tuple[float, bool]] = {}
        self._last_lines: dict[str, tuple[int, str]] = {}
        self._left: set[int] = set()
        self._changes: dict[int, str] = {}
        self._patched: dict[str, str] = {}
        self._asked = 0
        self._thread = threading.Thread(target=self._work, name="observer", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def choose(self, name: str) -> None:
        """From now on the output of this branch is handed out."""
        self._chosen = name
        self._woken.set()

    def look_now(self) -> None:
        """Looks without waiting: something has just been done."""
        self._woken.set()

    def close(self) -> None:
        """Stops polling. Does not wait for a running poll."""
        self._is_closed = True
        self._woken.set()

    def _work(self) -> None:
        while not self._is_closed:
            self._woken.clear()
            try:
                self._snapshot = self.look()
            except (BranchingError, OSError) as error:
                self._snapshot = replace(self._snapshot, error=str(error))
            if not self._is_closed:
                self._on_look(self._snapshot)
                self._follow()
            self._woken.wait(LOOK_SECONDS)

    def look(self) -> Snapshot:
        """Looks once. Raises BranchingError or OSError when nothing can be seen."""
        records = self._space.branches()
        entries = self._read_entries()
        self._left = {record.id for record in orphaned_branches(self._space, records)}
        self._ask_for_changes(records)
        children: dict[int, list[BranchRecord]] = {}
        for record in records:
            children.setdefault(record.parent, []).append(record)
        known = {record.id for record in records}
        roots = [record for record in records if record.parent not in known]
        views = list(self._tree(roots, children, entries, depth=0))
        names = {record.name for record in records}
        history = [commit for commit in self._space.history() if commit.undone is None]
        committed = {commit.branch: commit.committed for commit in history}
        gone = [
            self._gone(entry, committed) for entry in _worth_showing(entries, names, self._began)
        ]
        return Snapshot(views=tuple(_grouped([*views, *gone])), commits=len(history))

    def _tree(
        self,
        records: Iterable[BranchRecord],
        children: dict[int, list[BranchRecord]],
        entries: dict[str, Entry],
        depth: int,
    ) -> Iterable[BranchView]:
        for record in records:
            entry = entries.get(record.name)
            if entry is not None and entry.started < record.created - 1:
                entry = None  # of another branch that had the name before
            yield BranchView(
                name=record.name,
                depth=depth,
                state=self._state(record, entry),
                record=record,
                entry=entry,
                is_dropped_next=record.id in self._left,
                seconds=_seconds(entry),
                changes=self._changes.get(record.id, ""),
                last_line=self._last_line(record.name) if entry is not None else "",
            )
            yield from self._tree(children.get(record.id, ()), children, entries, depth + 1)

    def _state(self, record: BranchRecord, entry: Entry | None) -> str:
        if record.state == "stale":
            return "stale"
        if entry is None:
            return "lost" if record.id in self._left else "open"
        if entry.state in UNDER_WAY:
            return entry.state if self._is_attended(entry) else "lost"
        return entry.state

    def _gone(self, entry: Entry, committed: dict[str, float]) -> BranchView:
        state = entry.state
        if state in UNDER_WAY and not self._is_attended(entry):
            state = "lost"
        elif committed.get(entry.branch, 0.0) >= entry.started:
            state = "won"  # also one that was kept, and committed by hand
        return BranchView(
            name=entry.branch,
            depth=0,
            state=state,
            entry=entry,
            seconds=_seconds(entry),
            changes=self._kept_changes(entry),
            last_line=self._last_line(entry.branch),
            has_patch=self._logs is not None and (self._logs / f"{entry.branch}.patch").is_file(),
        )

    def _kept_changes(self, entry: Entry) -> str:
        """Returns the numbers of changes of a branch that is gone. Those of a candidate that was
        cancelled were not counted, and come from its patch."""
        if entry.changes:
            return DiffSummary.parse(entry.changes).short
        if self._logs is None or entry.state in UNDER_WAY:
            return ""
        if entry.branch not in self._patched:
            patch = read_patch(self._logs, entry.branch)
            changes = [] if patch is None else PatchSource(entry.branch, patch).changes()
            self._patched[entry.branch] = DiffSummary.of(changes).short if changes else ""
        return self._patched[entry.branch]

    def _last_line(self, name: str) -> str:
        """Reads the end of a log, if the log has grown since the last look."""
        if self._logs is None:
            return ""
        size, line = self._last_lines.get(name, (-1, ""))
        try:
            file = open_file(self._logs / f"{name}.log")
        except OSError:
            return line
        try:
            now = os.fstat(file).st_size
            if now != size:
                end = os.pread(file, LAST_LINE_BYTES_MAX, max(0, now - LAST_LINE_BYTES_MAX))
                lines = end.decode("utf-8", "replace").strip().splitlines()
                size, line = now, lines[-1] if lines else ""
        finally:
            os.close(file)
        self._last_lines[name] = (size, line)
        return line

    def _is_attended(self, entry: Entry) -> bool:
        if not entry.door or self._logs is None:
            return True  # unknown
        asked_at, answer = self._control_servers.get(entry.door, (0.0, True))
        if answer and time.monotonic() - asked_at > DOOR_SECONDS:
            answer = is_alive(self._logs / entry.door)
            self._control_servers[entry.door] = (time.monotonic(), answer)
        return answer

    def _read_entries(self) -> dict[str, Entry]:
        found: dict[str, tuple[int, Entry]] = {}
        for path in [] if self._logs is None else self._logs.glob("*.json"):
            try:
                stamp = path.lstat().st_mtime_ns
            except OSError:
                continue  # it goes just now
            before = self._entries.get(path.name)
            entry = before[1] if before and before[0] == stamp else read_entry(path)
            if entry is not None:
                found[path.name] = (stamp, entry)
        self._entries = found
        return {entry.branch: entry for _, entry in found.values()}

    def _ask_for_changes(self, records: list[BranchRecord]) -> None:
        """Asks what branches changed: the chosen one now and then, then those of which nothing is
        known, or else one in turn."""
        live = [record for record in records if record.state == "live"]
        self._changes = {record.id: self._changes.get(record.id, "") for record in live}
        chosen = [record for record in live if record.name == self._chosen]
        unknown = [record for record in live if not self._changes[record.id]]
        self._asked += 1
        turn = [live[self._asked % len(live)]] if live else []
        until = time.monotonic() + ASKING_SECONDS_MAX
        for record in (*chosen[: self._asked % 2], *(unknown or turn)):
            try:
                changes = self._space.reopen(record.name).diff()
                self._changes[record.id] = DiffSummary.of(changes).short
            except BranchingError:
                pass  # it has ended meanwhile
            if time.monotonic() > until:
                return

    def _follow(self) -> None:
        chosen = self._chosen
        if self._tail is None or self._tail.name != chosen:
            self._tail = None
            if not chosen or self._logs is None:
                return
            self._tail = Tail(chosen, self._logs / f"{chosen}.log")
        piece = self._tail.read()
        if piece is not None:
            self._on_output(piece)


class Tail:
    """The end of a log, updated as it grows."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._path = path
        self._offset: int | None = None
        self._rest = b""
        self._is_told = False
        self._is_missing = False

    def read(self) -> Output | None:
        """Returns the lines that have come since the last call, None if there are none."""
        try:
            file = open_file(self._path)
        except OSError:
            return self._piece((), is_kept=False)
        try:
            size = os.fstat(file).st_size
            if self._offset is None or size - self._offset > OUTPUT_BYTES_MAX:
                self._offset, self._rest = max(0, size - OUTPUT_BYTES_MAX), b""
                self._is_told = False
            data = os.pread(file, OUTPUT_BYTES_MAX, self._offset)
        finally:
            os.close(file)
        is_cut = not self._is_told and self._offset > 0
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(lines) > OUTPUT_LINES_MAX:
            lines, is_cut = lines[-OUTPUT_LINES_MAX:], True
        if is_cut:
            said = for_caller("[what came before is left out: branching log has it]")
            lines[:1] = [said.encode()]
        return self._piece(tuple(line.decode("utf-8", "replace") for line in lines))

    def _piece(self, lines: tuple[str, ...], *, is_kept: bool = True) -> Output | None:
        is_first = not self._is_told
        if not lines and (not is_first or (self._is_missing and not is_kept)):
            return None
        self._is_told, self._is_missing = is_kept, not is_kept
        return Output(name=self.name, is_first=is_first, lines=lines, is_kept=is_kept)


def _worth_showing(entries: dict[str, Entry], open_names: set[str], began: float) -> list[Entry]:
    """Returns those of branches that are gone: what ended while we look, and the newest call."""
    gone = [entry for entry in entries.values() if entry.branch not in open_names]
    gone.sort(key=lambda entry: (entry.started, entry.index))
    newest = gone[-1].call if gone else ""
    shown = [
        entry for entry in gone if entry.call == newest or entry.started + entry.seconds >= began
    ]
    return shown[-FINISHED_MAX:]


def _grouped(views: list[BranchView]) -> list[BranchView]:
    """Brings the candidates of each call together, with the branches inside them."""
    groups: dict[str, list[list[BranchView]]] = {}
    for view in views:
        if view.depth == 0:
            key = view.group or f"branch {view.name}"
            groups.setdefault(key, []).append([view])
        else:
            groups[key][-1].append(view)
    for blocks in groups.values():
        blocks.sort(key=lambda block: block[0].entry.index if block[0].entry else 0)
    return [view for blocks in groups.values() for block in blocks for view in block]


def _seconds(entry: Entry | None) -> float:
    if entry is None:
        return 0.0
    return time.time() - entry.started if entry.state in UNDER_WAY else entry.seconds
