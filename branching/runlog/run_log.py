"""The run log: output and state of candidates and commands, for `branching log`.

    STORE/logs/speculate-1a2b3c4d-0.log     output of the candidate
    STORE/logs/speculate-1a2b3c4d-0.json    its state and result (see `Entry`)
    STORE/logs/speculate-1a2b3c4d-0.patch   its changes (see `patches`)
    STORE/logs/9f3c2a1b.door                socket that controls the call (see `control_socket`)
    STORE/logs/kept                         marks a store that must not be removed

A log is named after its branch and outlives it. The directory belongs to the workspace's owner. It
is removed with the store when the workspace keeps nothing else. Logs of races keep the store,
because their output may not have been displayed. The newest `ENTRIES_MAX` entries are kept until
`branching prune`.

This process may be root while another user owns the directory and could place symbolic links in it.
All files are therefore created new, relative to the directory's descriptor, without following
links.

A call does not fail because of its log: if the log cannot be written (disk full, no permission), a
message is printed once on stderr and the call continues.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from branching.errors import BranchingError
from branching.fs.store_files import KEPT, is_name, open_directory, open_file, read
from branching.runlog.control_socket import SUFFIX, ControlServer, is_alive, remove_stale
from branching.runlog.events import takes_blocks, taking_blocks
from branching.runlog.patches import PATCH_BYTES_MAX, patch_of
from branching.runlog.patches import SUFFIX as PATCH_SUFFIX
from branching.runlog.run_controller import RunController

if TYPE_CHECKING:
    from branching.fs import Branch, Workspace
    from branching.runlog.events import Event

ENTRIES_MAX = 200
UNDER_WAY = ("running", "paused")
"""States of candidates that have not ended."""
LOG_BYTES_MAX = 10 << 20
"""Maximum size of one candidate's log. Output beyond it is displayed but not logged, and the last
line of the log says so."""

COMMAND_SUFFIX = "-command"
"""Suffix of the command's branch in a `run` with a setup. The branch of the setup has the name that
the user gave."""

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_AGAIN = os.O_WRONLY | os.O_CREAT | os.O_APPEND


class Entry(NamedTuple):
    """State and result of one candidate."""

    branch: str
    command: str
    """The subcommand that ran the candidate, such as "speculate"."""
    index: int  # type: ignore[assignment]  # hides the method of tuples
    label: str
    """Display name of the candidate: the command as given, or the name of the function."""
    state: str
    """"running", "paused", or as in `SpeculationResult.state`."""
    started: float
    """Unix time."""
    seconds: float = 0.0
    score: float | None = None
    changes: str = ""
    cost_usd: float | None = None
    """Cost of its model calls in US dollars; None if unknown."""
    cpu_seconds: float | None = None
    """CPU time of its processes, in seconds; None if unknown."""
    memory_peak_bytes: int | None = None
    """Peak memory of its processes; None if unknown."""
    predecessor: int | None = None
    """Index of the candidate whose result it started from, in a search by levels."""
    node: str = ""
    """Name of the node of the cluster that ran it."""
    beaten: Sequence[int] = ()
    """Indexes of the candidates that a judge found worse, in the order of the rounds."""
    door: str = ""
    """File name of the control socket beside the log, or "" if there is none."""

    @property
    def call(self) -> str:
        """The part of the name that all candidates of one call have in common."""
        if self.command == "run":  # the user chose the name of the branch
            return self.branch.removesuffix(COMMAND_SUFFIX)
        return self.branch.rpartition("-")[0]


class RunLog:
    """Writes the logs of one call, while its `with` is entered.

    Args:
        store: The store; None writes no log.
        owner: Uid and gid for the files, if this process is root.
        command: The subcommand, for `Entry.command`.
        keeps_store: Keep the store for these logs even if nothing else of the workspace is kept.
        has_thread: Serve the control socket in a thread. Otherwise the caller waits for clients:
            see `on_readable`.
    """

    def __init__(
        self,
        store: Path | None,
        owner: tuple[int, int],
        command: str,
        *,
        keeps_store: bool = False,
        has_thread: bool = True,
    ) -> None:
        self._store = store
        self._has_thread = has_thread
        self._keeps_store = keeps_store
        self._owner = owner
        self._command = command
        self._directory: int | None = None
        self._logs: dict[str, _Log] = {}
        self._entries: dict[str, Entry] = {}
        self._patched: dict[str, None] = {}
        # Guards the entries: the run controller reports states from another thread.
        self._lock = threading.Lock()
        self.controller = RunController(self._on_state, self.keep_patch)
        """The run controller of the call."""
        self._control_server: ControlServer | None = None

    @classmethod
    def of(
        cls,
        workspace: Workspace,
        command: str,
        *,
        keeps_store: bool = False,
        has_thread: bool = True,
    ) -> RunLog:
        """Returns the run log of a workspace.

        Inside a branch the store is not visible and nothing is logged: output there is already
        logged as that of the enclosing candidate.

        Args:
            workspace: The workspace.
            command: The subcommand, for `Entry.command`.
            keeps_store: As for the constructor.
            has_thread: As for the constructor.

        Returns:
            The run log, to be used in a `with` statement.
        """
        return cls(
            workspace.store,
            workspace.owner,
            command,
            keeps_store=keeps_store,
            has_thread=has_thread,
        )

    def and_then(self, listener: Callable[[Event], None]) -> Callable[[Event], None]:
        """Returns a listener that logs each event and then passes it on.

        Args:
            listener: The listener that receives the events after they are logged.

        Returns:
            The new listener. It takes blocks if `listener` does.
        """

        def on_event(event: Event) -> None:
            if self._directory is not None:
                try:
                    with self._lock:
                        if self._directory is not None:
                            self._write(self._directory, event)
                except OSError as error:
                    self._give_up(error)
            listener(event)

        return taking_blocks(on_event) if takes_blocks(listener) else on_event

    @property
    def is_open(self) -> bool:
        """Whether events are logged: the store is accessible, and no write has failed."""
        return self._directory is not None

    @property
    def on_readable(self) -> dict[int, Callable[[], None]]:
        """What to call when a descriptor is readable: a client waits at the control socket."""
        if self._control_server is None or self._has_thread:
            return {}
        return {self._control_server.fileno(): self._control_server.start}

    @property
    def branches(self) -> list[str]:
        """The branches of the candidates that the call has logged, in the order of their start."""
        return list(self._entries)

    @property
    def patched(self) -> list[str]:
        """The branches whose patch was saved."""
        return list(self._patched)

    def controlled(self) -> AbstractContextManager[None]:
        """Returns a context in which other processes can control the candidates of the call."""
        return self.controller.activate()

    def __enter__(self) -> RunLog:
        if self._store is not None and self._store.is_dir():
            try:
                self._directory = self._open(self._store / "logs")
                if self._keeps_store:
                    self._keep(self._directory)
                remove_stale(self._store / "logs")
                self._control_server = ControlServer(
                    self._directory, self._owner, self.controller, is_started=self._has_thread
                )
            except OSError as error:
                self._give_up(error)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._control_server is not None:
            self._control_server.close()
            self._control_server = None
        self._close()

    def _close(self) -> None:
        with self._lock:  # another thread may be writing; the descriptor number is reused
            if self._directory is not None:
                os.close(self._directory)
                self._directory = None
            while self._logs:
                self._logs.popitem()[1].close()

    def _on_state(self, branch: str, state: str) -> None:
        with self._lock:
            entry = self._entries.get(branch)
            if self._directory is not None and entry and entry.state in UNDER_WAY:
                self._note(self._directory, entry._replace(state=state))

    def keep_patch(self, branch: Branch, bytes_max: int = PATCH_BYTES_MAX) -> None:
        """Saves the patch of a branch before the branch ends.

        Does nothing for a branch without a log, or one that can no longer be read.

        Args:
            branch: The open branch.
            bytes_max: Maximum size of the patch, which is truncated at a line end.
        """
        with self._lock:
            if self._directory is None or branch.name not in self._entries:
                return
        try:
            patch = patch_of(branch, bytes_max)
        except BranchingError:
            return  # the error that ends the branch gives the reason
        with self._lock:
            if self._directory is None or not patch:
                return
            try:
                name = f"{branch.name}{PATCH_SUFFIX}"
                _remove(name, self._directory)
                file = open_file(name, _NEW, directory=self._directory)
                with os.fdopen(file, "wb") as opened:
                    self._give(file)
                    opened.write(patch)
                self._patched[branch.name] = None
                return
            except OSError as raised:
                error = raised
        self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._close()
        text = f"branching: output is no longer recorded for `branching log`: {error}"
        print(text, file=sys.stderr, flush=True)

    def _open(self, path: Path) -> int:
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            pass
        directory = open_directory(path)
        self._give(directory)
        return directory

    def _keep(self, directory: int) -> None:
        try:
            file = open_file(KEPT, _NEW, directory=directory)
        except FileExistsError:
            return
        self._give(file)
        os.close(file)

    def _make_room(self, directory: int) -> None:
        """Removes the oldest entries to make room for one, except those of running calls."""
        names = [name for name in os.listdir(directory) if name.endswith(".json")]
        excess = len(names) + 1 - ENTRIES_MAX
        if excess <= 0:
            return
        here = Path(f"/proc/self/fd/{directory}")
        control_servers = {path.name for path in here.glob(f"*{SUFFIX}")}
        for name in sorted(names, key=lambda name: _age(name, directory)):
            entry = read_entry(name, directory=directory)
            if entry is not None and entry.state in UNDER_WAY and entry.door in control_servers:
                continue
            branch = name.removesuffix(".json")
            for gone in (f"{branch}.log", f"{branch}{PATCH_SUFFIX}", name):
                _remove(gone, directory)
            excess -= 1
            if excess == 0:
                return

    def _write(self, directory: int, event: Event) -> None:
        if event.kind in ("started", "resumed"):
            self._begin(directory, event)
        elif event.kind == "output":
            self._logs[event.branch].write(event.text)
        elif event.branch in self._entries:
            facts = self._entries[event.branch]._asdict()
            is_stopped = event.state in ("failed", "error") and self.controller.is_stopped(
                event.branch
            )
            facts |= {"state": "cancelled" if is_stopped else event.state or facts["state"]}
            facts |= {"seconds": round(event.seconds, 3)} if event.seconds else {}
            facts |= {"score": event.score} if event.score is not None else {}
            facts |= {"cost_usd": event.cost_usd} if event.cost_usd is not None else {}
            facts |= {"node": event.node} if event.node else {}
            facts |= {"changes": str(event.changes)} if event.changes is not None else {}
            for name in ("cpu_seconds", "memory_peak_bytes"):
                facts |= {name: value} if (value := getattr(event, name)) is not None else {}
            facts |= {"beaten": [*facts["beaten"], event.loser]} if event.loser is not None else {}
            self._note(directory, Entry(**facts))

    def _begin(self, directory: int, event: Event) -> None:
        earlier = None
        if event.kind == "resumed":
            earlier = read_entry(f"{event.branch}.json", directory=directory)
        if earlier is None:
            self._make_room(directory)
            # An earlier branch may have had the same name; its log is replaced.
            _remove(f"{event.branch}.log", directory)
            _remove(f"{event.branch}{PATCH_SUFFIX}", directory)
        if before := self._logs.get(event.branch):
            before.close()
        flags = _AGAIN if earlier else _NEW
        file = open_file(f"{event.branch}.log", flags, directory=directory)
        self._logs[event.branch] = _Log(file)
        self._give(file)
        control_server = "" if self._control_server is None else self._control_server.name
        if earlier is not None:
            self._note(directory, earlier._replace(door=control_server))
            return
        entry = Entry(
            branch=event.branch,
            command=self._command,
            index=event.index,
            label=event.label,
            state="running",
            started=time.time(),
            door=control_server,
            predecessor=event.predecessor,
        )
        self._note(directory, entry)

    def _note(self, directory: int, entry: Entry) -> None:
        """Replaces the entry's file atomically."""
        self._entries[entry.branch] = entry
        scratch = f".{entry.branch}"
        file = open_file(scratch, _NEW, directory=directory)
        try:
            self._give(file)
            os.write(file, json.dumps(entry._asdict()).encode() + b"\n")
        finally:
            os.close(file)
        os.rename(scratch, f"{entry.branch}.json", src_dir_fd=directory, dst_dir_fd=directory)

    def _give(self, file: int) -> None:
        if os.geteuid() == 0:
            os.fchown(file, *self._owner)


def _age(name: str, directory: int) -> float:
    try:
        return os.lstat(name, dir_fd=directory).st_mtime
    except FileNotFoundError:
        return 0.0  # another call removed it


def _remove(name: str, directory: int) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        pass  # it did not exist, or another call removed it


class _Log:
    """The log file of one candidate. Output is written immediately, so that it can be followed."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._bytes = 0
        self._is_full = False

    def write(self, block: str) -> None:
        """Appends whole lines, given without the last newline."""
        if self._is_full:
            return
        data = block.encode("utf-8", "replace") + b"\n"
        if self._bytes + len(data) >= LOG_BYTES_MAX:
            self._is_full = True
            data = data[: data.rfind(b"\n", 0, LOG_BYTES_MAX - self._bytes) + 1]
            data += f"[log truncated at {LOG_BYTES_MAX} bytes]\n".encode()
        self._bytes += len(data)
        while data:
            data = data[os.write(self._file, data) :]

    def close(self) -> None:
        os.close(self._file)


def forget(logs: Path) -> None:
    """Removes the logs of candidates that have ended, and of calls that were killed.

    Does nothing if the directory does not exist.

    Args:
        logs: The directory of the logs.

    Raises:
        OSError: `logs` is a symbolic link, or not accessible.
    """
    try:
        directory = open_directory(logs)
    except FileNotFoundError:
        return
    try:
        here = Path(f"/proc/self/fd/{directory}")
        remove_stale(here)
        control_servers = {path.name for path in here.glob(f"*{SUFFIX}")}
        is_running = False
        for path in here.glob("*.json"):
            entry = read_entry(path.name, directory=directory)
            if entry is None:
                continue  # not an entry
            if entry.state in UNDER_WAY and entry.door in control_servers:
                is_running = True
                continue
            _remove(path.with_suffix(".log").name, directory)
            _remove(path.with_suffix(PATCH_SUFFIX).name, directory)
            _remove(path.name, directory)
        if not is_running:
            _remove(KEPT, directory)
    finally:
        os.close(directory)


def read_entries(logs: Path) -> list[Entry]:
    """Returns the entries of all logged candidates, oldest first."""
    found = [read_entry(path) for path in logs.glob("*.json")]
    entries = [entry for entry in found if entry is not None]
    return sorted(entries, key=lambda entry: (entry.started, entry.index))


def lost(logs: Path) -> list[Entry]:
    """Returns the entries of candidates that did not end because their program was killed."""
    under_way = [entry for entry in read_entries(logs) if entry.door and entry.state in UNDER_WAY]
    control_servers = {entry.door for entry in under_way}
    is_there = {
        control_server: is_alive(logs / control_server) for control_server in control_servers
    }
    return [entry for entry in under_way if not is_there[entry.door]]


def read_entry(path: Path | str, *, directory: int | None = None) -> Entry | None:
    """Reads an entry of the run log.

    Args:
        path: The file; a relative path is relative to `directory`.
        directory: A directory descriptor.

    Returns:
        The entry; None if the file is missing or not a valid entry. A valid entry refers only to
        files in the same directory.
    """
    try:
        entry = Entry(**json.loads(read(path, directory=directory)))
    except (OSError, ValueError, TypeError):
        return None
    is_ours = is_name(entry.branch) and (not entry.door or is_name(entry.door))
    return entry if is_ours else None
