"""The part of an attempt that runs on a node of a cluster, called by the engine.

It yields the name of the node (Started) and the output as it comes (str), and returns the result
(Reply).

The attempt runs in a thread. The caller's thread passes on the output, and asks whether the caller
has cancelled the attempt.
"""

from __future__ import annotations

import os
import pickle
import platform
import tempfile
import threading
import traceback
import zlib
from collections import deque
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import branching
from branching._cancellation import CancelScope
from branching.cluster.base_cache import BaseCache
from branching.cluster.engine import EngineError, ObjectStore, fetch_file, put_file
from branching.cluster.node_guard import start_guard
from branching.cluster.remote_attempt import Work, run_attempt
from branching.errors import ClusterError
from branching.fs import Workspace
from branching.patterns.command_candidate import BranchCommand
from branching.patterns.results import CandidateResult
from branching.process import Owner
from branching.runlog.events import Event, taking_blocks

OUTPUT_CHARACTERS_MAX = 256 << 10
"""Output of an attempt that travels: as much of its beginning, and as much of its end."""
_CANCEL_GRACE_SECONDS = 0.02
"""Time between SIGTERM and SIGKILL: what a loser would clean up is dropped with its branch."""
_FULL_DISK_BYTES = 1 << 20
"""Free space of a full disk: a write of up to this size fails as a whole."""
_POLL_SECONDS = 0.25
"""Time between two messages, and between two questions whether the attempt is cancelled."""
_FIRST_POLL_SECONDS = 0.1
"""Time until the first question: an attempt that is shorter costs no message for it."""
_MESSAGE_CHARACTERS = 32 << 10
"""Output in one message, but for a longer line: an engine may keep messages in memory."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """An attempt, as it travels to a node."""

    version: tuple[str, str]
    digest: str
    """Of the base archive."""
    base: list[object]
    """The pieces of the base archive."""
    layers: list[list[object]]
    """The pieces of each layer that it starts from."""
    work: bytes
    """A Work, pickled and compressed."""
    token: str
    """The attempt ends when this token is cancelled."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """The attempt has begun on a node. It may have waited for one."""

    node: str


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The result of an attempt, as it travels back."""

    answer: bytes
    """A CandidateResult, pickled and compressed."""
    output: str | None = None
    """The output that was not in a message."""
    layer: list[object] = field(default_factory=list)
    """The pieces of its layer, if it succeeded or is critiqued."""
    is_callback_error: bool = False
    """The answer's exception is that of `evaluate`, which ends the call."""


def own_version() -> tuple[str, str]:
    """Returns what must be the same on the node: the library's version, and Python's."""
    return branching.__version__, ".".join(platform.python_version_tuple()[:2])


def run_on_node(
    store: ObjectStore, request: Request
) -> Generator[Started | str | None, None, Reply]:
    """Runs an attempt. Its failures are part of the reply."""
    scope = CancelScope()
    output = _Output()
    replies: list[Reply] = []

    def run() -> None:
        replies.append(scope.run(_reply, store, request, output))

    thread = threading.Thread(target=run, name="attempt", daemon=True)
    thread.start()
    yield Started(node=store.node)
    thread.join(_FIRST_POLL_SECONDS)
    while thread.is_alive():
        if not scope.is_cancelled and store.is_cancelled(request.token):
            scope.cancel(_CANCEL_GRACE_SECONDS)
        thread.join(_POLL_SECONDS)
        if thread.is_alive():
            yield output.take(_MESSAGE_CHARACTERS)
    return replace(replies[0], output=output.take_last())


class _Output:
    """The output of an attempt, from one thread to another.

    After OUTPUT_CHARACTERS_MAX characters, the others are kept, and the last ones come at the end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: deque[str] = deque()
        self._left = OUTPUT_CHARACTERS_MAX
        self._tail: deque[str] = deque()
        self._tail_characters = 0
        self._dropped = 0

    def add(self, block: str) -> None:
        with self._lock:
            if self._left > 0:
                self._left -= len(block)
                self._blocks.append(block)
                return
            self._tail.append(block)
            self._tail_characters += len(block)
            while self._tail_characters - len(self._tail[0]) > OUTPUT_CHARACTERS_MAX:
                size = len(self._tail.popleft())
                self._tail_characters -= size
                self._dropped += size

    def take(self, characters_max: int) -> str | None:
        """Returns the next lines, without the last newline, or None if there are none."""
        blocks = []
        with self._lock:
            while self._blocks and characters_max > 0:
                characters_max -= len(self._blocks[0])
                blocks.append(self._blocks.popleft())
        return "\n".join(blocks) if blocks else None

    def take_last(self) -> str | None:
        """Returns the rest."""
        dropped = [f"[{self._dropped} characters left out]"] if self._dropped else []
        blocks = [*self._blocks, *dropped, *self._tail]
        return "\n".join(blocks) if blocks else None


def _reply(store: ObjectStore, request: Request, output: _Output) -> Reply:
    evaluate = None
    try:
        if request.version != own_version():
            raise ClusterError(
                f"node {store.node} has branching {own_version()[0]} and Python "
                f"{own_version()[1]}, not {request.version[0]} and {request.version[1]}; the "
                "attempt was not run",
                hint="install the same versions on all nodes",
                node=store.node,
            )
        work: Work = pickle.loads(zlib.decompress(request.work))
        if work.evaluate is not None:
            evaluate = _Evaluate(work.evaluate)
            work = replace(work, evaluate=evaluate)
        with tempfile.TemporaryFile() as layer:
            answer = _run(store, request, work, layer, output)
            layer.seek(0)
            pieces = put_file(store, layer)
        return Reply(answer=zlib.compress(_pickled(answer)), layer=pieces)
    except BaseException as error:
        is_callback_error = evaluate is not None and evaluate.error is error
        if isinstance(error, (OSError, branching.MountError, EngineError)):
            reason = ClusterError(
                f"node {store.node} could not run the attempt: {error}",
                hint="branching doctor, run on the node, checks what it needs, such as "
                "/dev/fuse; branching prune --bases frees space",
                node=store.node,
            )
            reason.__cause__ = error
            error = error if is_callback_error else reason
        answer = CandidateResult(success=False, exception=error, exit_code=1)
        return Reply(answer=zlib.compress(_pickled(answer)), is_callback_error=is_callback_error)


def _run(
    store: ObjectStore, request: Request, work: Work, layer: IO[bytes], output: _Output
) -> CandidateResult:
    was_full = False

    @taking_blocks
    def on_event(event: Event) -> None:
        nonlocal was_full
        if event.kind == "output":
            output.add(event.text)
        elif event.kind == "finished" and event.state in ("failed", "error"):
            was_full = _is_full(base)  # before the branch is dropped

    def fetch(file: IO[bytes]) -> None:
        fetch_file(store, request.base, file)

    cache = BaseCache()
    with ExitStack() as stack:
        base = stack.enter_context(cache.unpacked(fetch, request.digest))
        space = stack.enter_context(Workspace.open(base))
        start_guard(cache, request.digest, space)
        owner = stack.enter_context(Owner.of(*space.owner))
        work = replace(
            work,
            candidate=_placed(work.candidate, space, owner),
            evaluate=_placed(work.evaluate, space, owner),
        )
        layers = []
        for pieces in request.layers:
            file = stack.enter_context(tempfile.TemporaryFile())
            fetch_file(store, pieces, file)
            file.seek(0)
            layers.append(file)
        answer = run_attempt(space, work, layers=layers, out=layer, on_event=on_event).answer
    if not was_full:
        return answer
    reason = f": {answer.exception}" if answer.exception is not None else ""
    full = ClusterError(
        f"node {store.node} ran out of disk space in {cache.directory} during the attempt{reason}",
        hint="branching prune --bases, run on the node, makes room",
        node=store.node,
    )
    return answer._replace(exception=full)


def _is_full(directory: Path) -> bool:
    status = os.statvfs(directory)
    # Root has the reserved blocks, too.
    blocks = status.f_bfree if os.geteuid() == 0 else status.f_bavail
    return blocks * status.f_frsize < _FULL_DISK_BYTES


class _Evaluate:
    """The user's `evaluate`, with the exception that it raised."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.error: BaseException | None = None
        self.ends_when_cancelled = getattr(function, "ends_when_cancelled", False)

    def __call__(self, path: Any) -> Any:
        try:
            return self._function(path)
        except BaseException as error:
            self.error = error
            raise

    def placed(self, workspace: Workspace, owner: Owner | None) -> _Evaluate:
        self._function = _placed(self._function, workspace, owner)
        return self


def _placed(function: Any, space: Workspace, owner: Owner | None) -> Any:
    """Lets a command run in a workspace of this node."""
    if isinstance(function, BranchCommand):
        return function.placed(space.seen_at, owner)
    return function.placed(space, owner) if isinstance(function, _Evaluate) else function


def _pickled(answer: CandidateResult) -> bytes:
    try:
        data = pickle.dumps(answer)
        pickle.loads(data)
        return data
    except Exception:  # whatever a user's class raises
        error = answer.exception
        if error is not None:
            text = "".join(traceback.format_exception_only(type(error), error)).strip()
            error = ClusterError(f"{text} (this exception cannot be sent from the node)")
        elif answer.success:
            error = ClusterError(
                f"the candidate returned {type(answer.value).__name__}, which cannot be pickled",
                hint="return a bool, or a pair of a bool and a score",
            )
        return pickle.dumps(
            answer._replace(success=False, value=None, exception=error, exit_code=1)
        )
