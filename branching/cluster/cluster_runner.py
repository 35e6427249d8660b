"""The runner of a pattern whose attempts run on a cluster.

    anchor      a branch that is forked here at the start of the call; the setup runs in it
    base        an archive of the anchor's content, stored by the engine
    attempt     runs on a node in a branch of the base; its layer stays there
    parent      a branch here that later attempts start from: its layer is stored by the engine too
    winner      its layer is loaded below the anchor and merged into it; the anchor is committed

So concurrent changes here are detected as conflicts, as for a local branch. Loading compares each
path of the layer with the anchor.

A thread of this process waits for each attempt, so a limited number is submitted at once. They are
submitted in the order of their start: a cluster without room for all runs the first ones first.
"""

from __future__ import annotations

import os
import pickle
import re
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from branching.cluster.base_cache import digest_of_file
from branching.cluster.engine import Engine, EngineError, fetch_file, put_file
from branching.cluster.node_attempt import Reply, Request, Started, own_version, run_on_node
from branching.cluster.remote_attempt import Work
from branching.errors import ClusterError, ConflictError
from branching.fs import Branch, Workspace
from branching.patterns.attempt import Attempt, Task
from branching.patterns.command_candidate import BranchCommand
from branching.patterns.completion_queue import CompletionQueue
from branching.patterns.process_isolation import IsolationOptions
from branching.patterns.results import CandidateResult, State
from branching.patterns.runner import Runner, Stopped
from branching.patterns.worker_threads import Workers
from branching.process.sandbox.masked_files import find as find_hidden

if TYPE_CHECKING:
    from branching.process import ResourceLimits

IN_FLIGHT_MAX = 1000
"""Maximum number of submitted attempts, unless `max_parallel` is lower."""
GIVE_UP_SECONDS = 2.0
"""Time that cancelled attempts have to end. Then they are not waited for: they still wait for a
node, and will end as soon as they start, or the engine will not see for a while that their node is
lost."""


class ClusterRunner(Runner):
    """A Runner whose candidates run on the nodes of an engine."""

    is_remote = True
    _workers: _ClusterWorkers

    def __init__(
        self,
        parent: Workspace | Branch,
        *,
        engine: Engine,
        exclude: Sequence[str],
        limits: ResourceLimits | None = None,
        group_limits: ResourceLimits | None = None,
        **options: Any,
    ) -> None:
        if group_limits is not None:
            raise ValueError(
                "group_limits cannot be enforced on several machines: use resource_limits"
            )
        if options.get("keep_failed") or options.get("keep_losers"):
            raise ValueError(
                "keep_failed and keep_losers keep branches of this machine, not those of a cluster"
            )
        super().__init__(parent, is_between=True, **options)
        self._engine = engine
        self._exclude = exclude
        self._node_limits = limits
        self._max_parallel = min(self._max_parallel, IN_FLIGHT_MAX)
        self._workers = _ClusterWorkers(engine, self._completions, self._on_finished)
        self._layers: dict[int, list[object]] = {}
        """By number of the attempt, the references to its layer."""
        self._packed: dict[tuple[str, ...], tuple[str, list[object]]] = {}
        """By the globs that a candidate hides, the digest of the base and the references to it."""
        self._hide: tuple[str, ...] = ()
        """Globs that the candidate which is being started hides."""
        self._turns: dict[Attempt, tuple[threading.Event, threading.Event, str]] = {}
        """Set when the attempt started before this one has been submitted, and when it has. The
        cancellation token of the attempt."""
        self._last_turn = threading.Event()
        self._last_turn.set()
        self._parents: dict[str, Branch] = {}
        """By name of a nested branch, its parent."""
        self._packed_parents: dict[str, list[object]] = {}
        """By name of a parent, the references to its layer."""
        self._starts: dict[int, list[list[object]]] = {}
        """By number of the attempt, the references to the layers that it starts from."""

    def start(self, candidate: Callable[..., object], *args: object, **options: Any) -> Attempt:
        """Queues a candidate. The files that it hides are not sent."""
        self._hide = self._hidden_by(candidate)
        return super().start(candidate, *args, **options)

    def bring(self, attempt: Attempt) -> bool:
        """Loads the layer of an attempt below its parent, which is the anchor or was loaded."""
        if not attempt.is_elsewhere:
            return True
        layer = self._layers.get(attempt.index)
        if not layer:
            return False
        parent = self._parents.get(attempt.branch.name, self._branches.between)
        assert parent is not None, "it was forked before the attempt started"
        with tempfile.NamedTemporaryFile(prefix="branching-layer-", suffix=".tar") as file:
            try:
                self._wait_for(attempt, lambda: fetch_file(self._engine, layer, file))
            except EngineError as error:
                reason = (
                    f"the changes of {attempt.branch.name!r} were lost with their node: {error}"
                )
                self.fail(attempt, ClusterError(reason, branch=attempt.branch.name))
                self._events.finished(attempt)
                return False
            file.seek(0)
            try:
                branch = parent.load(attempt.branch.name, file, leased=attempt.branch.is_leased)
            except ConflictError as error:
                kept = f"{file.name}.kept"
                os.link(file.name, kept)
                said = f"its changes are kept in {kept}, for branching load"
                error.hint = f"{error.hint}; {said}" if error.hint else said
                raise
        self._branches.replace(attempt.branch, branch)
        attempt.branch = branch
        attempt.is_elsewhere = False
        return True

    def _branch(self, purpose: int | str, parent: Branch | None = None) -> Branch:
        branch = super()._branch(purpose, parent)
        if parent is not None:
            self._parents[branch.name] = parent
        if self._hide not in self._packed:
            anchor = self._branches.between
            assert anchor is not None, "the call above has forked it"
            exclude = [*self._exclude, *_hidden_paths(anchor.path, self._hide)]
            with tempfile.TemporaryFile() as file:
                anchor.export(file, whole=True, exclude=exclude)
                digest = digest_of_file(file)
                self._packed[self._hide] = digest, put_file(self._engine, file)
        return branch

    def _hidden_by(self, candidate: Callable[..., object]) -> tuple[str, ...]:
        if isinstance(candidate, BranchCommand):
            return candidate.hide
        return tuple(self._apart.hide) if self._apart is not None else ()

    def merge(self, attempt: Attempt) -> None:
        """Commits the attempt's branch into its parent, whose layer is then another."""
        super().merge(attempt)
        self._packed_parents.pop(self._parents[attempt.branch.name].name, None)

    def _open(self, attempt: Attempt) -> None:
        """Gives the attempt its turn to be submitted. There is no branch of it here."""
        before, self._last_turn = self._last_turn, threading.Event()
        token = self._workers.token()
        self._turns[attempt] = before, self._last_turn, token
        self._starts[attempt.index] = self._stored_layers(self._parents.get(attempt.branch.name))

    def _stored_layers(self, branch: Branch | None) -> list[list[object]]:
        """Returns the references to the layers of a branch below the anchor, lowest first."""
        if branch is None:
            return []
        layers = self._stored_layers(self._parents.get(branch.name))
        # From here, not from the node that made it: the layer outlives that node.
        if branch.name not in self._packed_parents:
            with tempfile.TemporaryFile() as file:
                if branch.diff():
                    branch.export(file)
                    file.seek(0)
                self._packed_parents[branch.name] = put_file(self._engine, file)
        layer = self._packed_parents[branch.name]
        return [*layers, layer] if layer else layers

    def _wait_for(self, attempt: Attempt, fetch: Callable[[], object]) -> None:
        """Calls `fetch` in a thread, so that the call can be cancelled meanwhile."""
        task = Task(attempt, self._events.say, must_end=False)
        reply = self._workers.ask(task, fetch, ())
        while reply.take is None:
            self._completions.act()
            if self._events.error is not None:
                raise self._events.error
            if self.is_cancelled:
                raise Stopped
        reply.take()

    def _answer(
        self,
        candidate: Callable[..., object],
        task: Task,
        args: tuple[object, ...],
        read: Callable[[object], CandidateResult],
        *,
        wins_at_once: bool,  # noqa: ARG002  (the changes are listed on the node)
    ) -> CandidateResult:
        attempt = task.attempt
        work = Work(
            candidate=candidate,
            arguments=args,
            read=read,
            index=attempt.index,
            feedback=attempt.feedback,
            evaluate=attempt.evaluate,
            is_critiqued=attempt.is_critiqued,
            limits=self._node_limits,
            apart=self._apart or IsolationOptions(),
        )
        digest, base = self._packed[self._hidden_by(candidate)]
        name = attempt.branch.name
        before, after, token = self._turns.pop(attempt)
        try:
            request = Request(
                version=own_version(),
                digest=digest,
                base=base,
                layers=self._starts.pop(attempt.index),
                work=zlib.compress(self._engine.pickle(work)),
                token=token,
            )
            before.wait()
            needs = [*base, *(piece for layer in request.layers for piece in layer)]
            submitted = self._engine.submit(run_on_node, request, needs=needs, token=token)
        finally:
            after.set()
        try:
            with self._workers.waiting_for(submitted):
                reply = self._received(task, submitted)
        except EngineError as error:
            raise ClusterError(
                f"attempt {name!r} was lost: {error}",
                hint="a node or its worker process has ended; the other attempts are not affected",
                branch=name,
            ) from error
        answer: CandidateResult = pickle.loads(zlib.decompress(reply.answer))
        if reply.is_callback_error and answer.exception is not None:
            self._events.fail(answer.exception)
        self._layers[attempt.index] = reply.layer
        return answer

    def _received(self, task: Task, submitted: object) -> Reply:
        """Passes on the messages of an attempt while it runs, and returns its reply."""

        def listener(message: Started | str) -> None:
            if isinstance(message, Started):
                task.attempt.node = message.node
                self._events.tell(task.attempt, "placed", message.node)
            else:
                task.say(message)

        reply: Reply = self._engine.receive(submitted, listener)
        if reply.output is not None:
            task.say(reply.output)
        return reply

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        try:
            return super().__exit__(kind, error, traceback)
        finally:
            self._engine.close()


def _hidden_paths(directory: Path, globs: Sequence[str]) -> list[str]:
    """Returns patterns for the paths that the globs hide, and for other names of the same files."""
    if not globs:
        return []
    top = f"{directory}/"
    places = [place for place in find_hidden(str(directory), globs) if place.startswith(top)]
    return ["/" + re.sub(r"([][*?{}!\\])", r"\\\1", place.removeprefix(top)) for place in places]


class _ClusterWorkers(Workers):
    """Cancels attempts by a token of the engine, and gives those up that do not end."""

    def __init__(
        self,
        engine: Engine,
        completions: CompletionQueue,
        on_finished: Callable[[Attempt, State, CandidateResult], None],
    ) -> None:
        super().__init__(completions, on_finished)
        self._engine = engine
        self._token: str | None = None
        self._lock = threading.Lock()
        self._waited_for: list[object] = []
        self._settled: threading.Event | None = None
        """Ends the thread that gives attempts up, once they are cancelled."""

    def token(self) -> str:
        """Returns the cancellation token of the attempts until they have settled."""
        if self._token is None:
            self._token = self._engine.new_token()
        return self._token

    @contextmanager
    def waiting_for(self, submitted: object) -> Iterator[None]:
        """Lets the attempt be given up in the block. Called in the threads of the tasks."""
        with self._lock:
            self._waited_for.append(submitted)
        try:
            yield
        finally:
            with self._lock:
                self._waited_for.remove(submitted)

    def cancel(self, grace_seconds: float) -> None:
        super().cancel(grace_seconds)
        if self._token is None or self._settled is not None:
            return
        self._engine.cancel(self._token)
        self._settled = threading.Event()
        threading.Thread(
            target=self._give_up, args=(self._settled,), name="give up attempts", daemon=True
        ).start()

    def settle(self, grace_seconds: float) -> None:
        try:
            super().settle(grace_seconds)
        finally:
            if self._settled is not None:
                self._settled.set()
            self._token = self._settled = None

    def _give_up(self, settled: threading.Event) -> None:
        while not settled.wait(GIVE_UP_SECONDS):
            with self._lock:
                waited_for = list(self._waited_for)
            for each in waited_for:
                self._engine.give_up(each)
