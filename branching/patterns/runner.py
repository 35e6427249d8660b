"""The runner that all patterns use: it forks branches, runs candidates and cleans up.

A pattern opens a Runner for one call and decides only what to try and how to choose:

    with Runner(workspace, name=..., timeout=60) as runner:
        for candidate in candidates:
            runner.start(candidate)
        for attempt in runner.finished():
            if attempt.succeeded:
                runner.commit(attempt)
                break
    return runner.outcome()

Leaving the `with`, normally or by an exception, kills and reaps all commands, and aborts branches
that were neither committed nor kept. A plain function cannot be killed; its thread is not waited
for and continues in a branch that no longer exists (ESTALE).

Only the calling thread changes attempts, and creates and ends branches. The worker threads
(`worker_threads`) post results to a `completion_queue`, which the calling thread empties whenever
it waits (`_pump`). The time limit applies to everything in the runner. If it expires while the
pattern waits for a required result, `Stopped` is raised. The end of the `with` suppresses it, and
the outcome says that nothing was committed.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from branching._cancellation import STOP_GRACE_SECONDS, CancelScope
from branching._signals import defer_sigint
from branching.fs import Branch, Change, DiffSummary, Workspace
from branching.patterns.attempt import (
    Attempt,
    Task,
    changes_of,
    ends_when_cancelled,
    label_of,
    out_of_time,
    setup_failed,
    with_end,
)
from branching.patterns.branch_set import BranchSet
from branching.patterns.completion_queue import CompletionQueue
from branching.patterns.event_dispatch import EventDispatcher
from branching.patterns.outcome import SpeculationOutcome
from branching.patterns.results import CandidateResult, State, read_verdict, reject_coroutines
from branching.patterns.worker_threads import Workers
from branching.runlog.events import SETUP_INDEX, EventKind, OnEvent

if TYPE_CHECKING:
    from branching.fs.backend import Policy
    from branching.patterns.process_isolation import IsolationOptions
    from branching.patterns.scoring import Evaluate
    from branching.process import ResourceLimits

LOSER_GRACE_SECONDS = 0.02
"""Time between SIGTERM and SIGKILL for the losers of a race. The winner's latency must stay below
50 ms, and files that a loser would clean up are dropped with its branch."""

RunElsewhere = Callable[..., object]
"""`runner(candidate, arguments, *, timeout)` runs a candidate elsewhere and returns its value."""


class Cluster(Protocol):
    """Other machines that run candidates, such as a `branching.cluster.RayRunner`."""

    def open_runner(self, parent: Workspace | Branch, **options: Any) -> Runner:
        """Returns the runner of one call, with the options of `Runner`."""


class Stopped(Exception):
    """The time limit expired, or the call was cancelled. Never propagates out of the runner."""


class Runner:
    """Runs candidates in branches of `parent`. Leaves no process and no unneeded branch."""

    is_remote = False
    """Whether candidates run on other machines."""

    def __init__(
        self,
        parent: Workspace | Branch,
        *,
        name: Callable[[int | str], str],
        timeout: float | None = None,
        max_parallel: int | None = None,
        commit: bool = True,
        only: Sequence[str] = (),
        drop_rest: bool = False,
        setup: Callable[..., object] | None = None,
        keep_failed: bool = False,
        keep_losers: bool = False,
        elsewhere: RunElsewhere | None = None,
        on_event: OnEvent | None = None,
        apart: IsolationOptions | None = None,
        limits: ResourceLimits | None = None,
        group_limits: ResourceLimits | None = None,
        is_nested: bool = False,
        is_between: bool = False,
        policy: Policy | None = None,
        first_index: int = 0,
    ) -> None:
        self._budget = None
        if limits is not None or group_limits is not None:
            from branching.process import (
                CallLimits,  # functions without limits need no process layer
            )

            self._budget = CallLimits(limits, group_limits)
        self._apart = apart
        """Isolation options of function candidates; None runs them in threads."""
        self._timeout = timeout
        self._max_parallel = math.inf if max_parallel is None else max_parallel
        self._commits = commit
        self._only = only
        self._drop_rest = drop_rest
        self._setup = setup
        self._keeps_failed = keep_failed
        self._keeps_losers = keep_losers
        self._branches = BranchSet(
            parent,
            name,
            self._budget,
            is_between=is_between or setup is not None,
            is_nested=is_nested,
            is_part=bool(only),
            policy=policy,
        )
        self._elsewhere = elsewhere

        self._completions = CompletionQueue(timeout)
        self._workers = Workers(self._completions, self._on_finished)
        self._events = EventDispatcher(on_event, wake=lambda: self._completions.post(lambda: None))
        self._outer = CancelScope.current()
        self._interrupts = ExitStack()
        self._first_index = first_index
        """Number of the first attempt: a part of a call can run in a runner of its own."""
        self._attempts: list[Attempt] = []
        self._waiting: deque[tuple[Attempt, Callable[[], CandidateResult], Task]] = deque()
        self._finished: deque[Attempt] = deque()
        self._winner: Attempt | None = None
        self._winning_branch: Branch | None = None
        self._changes: list[Change] = []

    # Running candidates.

    def start(
        self,
        candidate: Callable[..., object],
        *args: object,
        read: Callable[[object], CandidateResult] = read_verdict,
        feedback: str = "",
        parent: Branch | None = None,
        predecessor: Attempt | None = None,
        wins_at_once: bool = False,
        evaluate: Evaluate | None = None,
        is_critiqued: bool = False,
    ) -> Attempt:
        """Queues `candidate(path, *args)`, which runs as soon as `max_parallel` allows.

        Exceptions of the creation of a branch propagate.

        Args:
            candidate: The candidate.
            *args: Its arguments after the path.
            read: Interprets its return value.
            feedback: Feedback on earlier attempts, as text for a command.
            parent: The parent of its branch. Default: the parent of the call.
            predecessor: The attempt whose result it starts from, for the listener.
            evaluate: Returns the score of a success. A cluster calls it where the attempt ran.
            is_critiqued: Its branch is read after a failure, too. A cluster then keeps its changes.
            wins_at_once: Do not list the changes of a success; its commit will return them.
        """
        if (
            self._apart is not None
            and self._apart != type(self._apart)()
            and ends_when_cancelled(candidate)
        ):
            raise TypeError(
                "isolation, network, env, clean_env and hide are for functions: a command has "
                "its own"
            )
        index = self._first_index + len(self._attempts)
        attempt = Attempt(index, self._branch(index, parent), feedback, label_of(candidate))
        attempt.budget = self._budget
        attempt.predecessor = None if predecessor is None else predecessor.index
        attempt.evaluate, attempt.is_critiqued = evaluate, is_critiqued
        attempt.is_elsewhere = self.is_remote
        must_end = self.is_remote or self._apart is not None or ends_when_cancelled(candidate)
        task = Task(attempt, self._events.say, must_end=must_end)
        self._attempts.append(attempt)

        def work() -> CandidateResult:
            return self._answer(candidate, task, args, read, wins_at_once=wins_at_once)

        self._waiting.append((attempt, work, task))
        self._launch()
        return attempt

    def fork(self, name: str) -> Branch:
        """Creates a branch to merge attempts into. It is aborted at the end unless committed."""
        return self._branch(name).__enter__()

    def finished(self, *, within: float | None = None) -> Iterator[Attempt]:
        """Yields each attempt when it finishes, until all have, or the time limit expires.

        `within` is a time limit in seconds for this wait only.
        """
        until = math.inf if within is None else time.monotonic() + within
        while True:
            while self._finished:
                yield self._finished.popleft()
            if not self._workers.running and not self._waiting:
                return
            if not self._pump(until):
                return

    def finish(self, attempt: Attempt) -> None:
        """Waits for one attempt. Raises Stopped if the time limit expires first."""
        while attempt.state is None:
            if not self._pump():
                raise Stopped
        self._finished.remove(attempt)

    def stop(self, *, timed_out_after: float | None = None) -> None:
        """Stops all attempts: kills those that can be killed, and waits for them.

        With `timed_out_after`, their state is timed_out, and the message names this number of
        seconds. The same happens if the time limit of the call has expired.
        """
        self._give_up(self._timeout if self._completions.is_out_of_time else timed_out_after)
        self._workers.settle(LOSER_GRACE_SECONDS if self._winner else STOP_GRACE_SECONDS)

    # Choosing a winner.

    def consult(self, attempt: Attempt, callback: Callable[..., object], *args: object) -> object:
        """Calls one of the user's callbacks about `attempt`. Its exception propagates."""
        return self.consult_all([(attempt, callback, args)])[0]

    def consult_all(
        self, calls: Sequence[tuple[Attempt, Callable[..., object], tuple[object, ...]]]
    ) -> list[object]:
        """Calls several of the user's callbacks concurrently. The first exception propagates.

        They run in separate threads, so that the time limit applies to them, too.
        """
        replies = [
            self._workers.ask(
                Task(attempt, self._events.say, must_end=ends_when_cancelled(callback)),
                callback,
                args,
            )
            for attempt, callback, args in calls
        ]
        values: list[object] = []
        for reply in replies:
            while reply.take is None:
                if not self._pump():
                    raise Stopped
            values.append(reply.take())
        return values

    def rate(self, attempt: Attempt, score: float) -> None:
        """Sets the score of an attempt. Only rated attempts are ranked."""
        attempt.score, attempt.is_rated = score, True
        self._events.tell(attempt, "scored", score=score)

    def fail(self, attempt: Attempt, error: Exception) -> None:
        """Turns a success into an error because its result cannot be used."""
        attempt.state, attempt.score = "error", 0.0
        attempt.answer = CandidateResult(
            success=False, value=attempt.answer.value, exception=error, exit_code=1
        )

    def tell(
        self, attempt: Attempt, kind: EventKind, text: str, *, loser: Attempt | None = None
    ) -> None:
        """Reports an event of the pattern itself to the listener."""
        self._events.tell(attempt, kind, text, loser=None if loser is None else loser.index)

    def drop(self, attempt: Attempt) -> None:
        """Aborts the attempt's branch now, if it is open.

        With `keep_failed` or `keep_losers` this is delayed until the end, when it is known if there
        is a winner.
        """
        if not (self._keeps_failed or self._keeps_losers):
            self._branches.drop(attempt.branch)

    def bring(self, attempt: Attempt) -> bool:
        """Makes the branch of an attempt available here. False if it was lost with its node.

        The time limit does not apply: it has ended the wait for candidates, or does so later.
        """
        return not attempt.is_elsewhere

    def keep(self, attempt: Attempt) -> None:
        """Leaves the attempt's branch open after the call.

        With an intermediate branch, the attempt is merged into that one, which stays open.
        """
        self._branches.keep(self._branches.merged(attempt.branch))

    def merge(self, attempt: Attempt) -> None:
        """Commits the attempt's branch into its parent, which is also a branch of this call."""
        if self.is_cancelled:
            raise Stopped
        self._branches.drop_below(attempt.branch)
        attempt.branch.commit()

    def commit(self, attempt: Attempt, branch: Branch | None = None) -> None:
        """Makes the attempt the winner, and commits its branch.

        A runner with `commit=False` leaves the branch open instead. If the commit is refused but
        possible later (the base was changed, the disk is full), the branch is kept.

        Args:
            attempt: The winner.
            branch: The branch that the attempt was merged into, if any. It is committed instead.

        Raises:
            ConflictError: The commit conflicts with changes made elsewhere.
            CommitError: The commit was refused.
        """
        if self.is_cancelled:
            raise Stopped
        # The others have lost even if the commit fails. They end while the disk is busy.
        self._workers.cancel(LOSER_GRACE_SECONDS)
        branch = branch or attempt.branch
        if self._branches.between is not None:
            attempt.changes = attempt.changes or changes_of(branch)
            branch = self._branches.merged(branch)
        if not self._commits:
            attempt.changes = attempt.changes or changes_of(branch)
            self._branches.keep(branch)
        else:
            self._changes = self._branches.commit(
                branch, only=self._only, drop_rest=self._drop_rest
            )
            if branch is attempt.branch:
                attempt.changes = DiffSummary.of(self._changes)
        attempt.state = "won"
        self._winner, self._winning_branch = attempt, branch
        self._events.tell(attempt, "committed" if self._commits else "kept")

    @property
    def forgotten(self) -> list[str]:
        """Branch names of earlier commits that the call's commit removed from the history."""
        return self._branches.forgotten

    @property
    def remaining(self) -> int:
        """Number of changed paths that the commit left in the winner's branch."""
        if not self._commits or self._winning_branch is None:
            return 0
        return self._winning_branch.remaining

    @property
    def is_cancelled(self) -> bool:
        """Whether the call was cancelled. Nothing may be committed then."""
        return self._completions.is_cancelled

    @property
    def is_over(self) -> bool:
        """Whether the time limit has expired or the call was cancelled. Nothing more may start."""
        return self._completions.is_over

    def outcome(self) -> SpeculationOutcome:
        """Returns the outcome of the call. Call it after the `with`."""
        results = [attempt.result() for attempt in self._attempts]
        winner = None if self._winner is None else results[self._winner.index - self._first_index]
        return SpeculationOutcome(
            committed=winner is not None and self._commits,
            winner=winner,
            all_results=results,
            branch=None if self._commits and not self.remaining else self._winning_branch,
            remaining=self.remaining,
            changes=self._changes,
            commit_id=self._branches.commit_id if winner is not None and self._commits else None,
            timed_out=self._completions.is_out_of_time and winner is None,
        )

    # Internals of running.

    def _branch(self, purpose: int | str, parent: Branch | None = None) -> Branch:
        """Returns a new branch that is not created yet. Runs the setup first if necessary."""
        between = self._branches.open_between()
        if between is not None and self._setup is not None:
            self._prepare(self._setup, between)
        return self._branches.branch(purpose, parent)

    def _prepare(self, setup: Callable[..., object], branch: Branch) -> None:
        """Runs the setup in the intermediate branch, from which all others are then forked."""
        attempt = Attempt(SETUP_INDEX, branch, "", label_of(setup))
        attempt.budget = self._budget
        attempt.begin()
        self._events.tell(attempt, "started")
        said = self.consult(attempt, self._placed(setup), branch.path)
        answer = CandidateResult(success=True) if said is None else read_verdict(said)
        attempt.end("succeeded" if answer.success else "failed", answer)
        self._events.finished(attempt)
        if not answer.success:
            raise setup_failed(answer.error or said)

    def _answer(
        self,
        candidate: Callable[..., object],
        task: Task,
        args: tuple[object, ...],
        read: Callable[[object], CandidateResult],
        *,
        wins_at_once: bool,
    ) -> CandidateResult:
        """Runs a candidate in the thread of its task."""
        answer = with_end(read(reject_coroutines(self._call(candidate, task, args))), task)
        if task.is_cancelled or (answer.success and wins_at_once):
            return answer  # a cancelled candidate must not delay the winner
        return answer._replace(changes=changes_of(task.attempt.branch))

    def _open(self, attempt: Attempt) -> None:
        """Creates the branch of an attempt."""
        attempt.branch.__enter__()

    def _call(
        self, candidate: Callable[..., object], task: Task, args: tuple[object, ...]
    ) -> object:
        candidate = self._placed(candidate)
        if self._elsewhere is None:
            return candidate(task.attempt.path, *args)
        timeout = self._completions.seconds_left
        return self._elsewhere(candidate, (task.attempt.path, *args), timeout=timeout)

    def _placed(self, function: Callable[..., object]) -> Callable[..., object]:
        """Returns the function, wrapped to run in a separate process if isolation is on."""
        if self._apart is None or ends_when_cancelled(function):
            return function
        from branching.patterns.process_isolation import isolated

        return isolated(function, self._apart)

    def _launch(self) -> None:
        # An attempt that has finished keeps its place until the pattern has seen it, so that the
        # number of open branches is limited while the pattern rates another one.
        while (
            self._waiting and len(self._workers.running) + len(self._finished) < self._max_parallel
        ):
            attempt, work, task = self._waiting.popleft()
            self._open(attempt)
            attempt.begin()
            self._events.tell(attempt, "started")
            self._workers.start(attempt, task, work)

    def _on_finished(self, attempt: Attempt, state: State, answer: CandidateResult) -> None:
        if attempt.state is None:  # otherwise it was already timed out or cancelled
            attempt.end(state, answer)
            self._events.finished(attempt)
            self._finished.append(attempt)

    def _pump(self, until: float = math.inf) -> bool:
        """Waits for one closure and runs it. Returns False if the time is over or on cancel."""
        if self._completions.is_cancelled or self._completions.is_out_of_time:
            return False
        # Started only here, because a pattern that has found its winner waits no more.
        self._launch()
        if not self._completions.act_in_time(until):
            return False
        if self._events.error is not None:
            raise self._events.error
        return not self._completions.is_cancelled

    # Ending.

    def __enter__(self) -> Runner:
        # Ctrl-C cancels the call. A KeyboardInterrupt raised at any point could lose a branch that
        # was just created, or the result of a thread.
        with ExitStack() as stack:
            stack.enter_context(
                defer_sigint(lambda again: self._cancel(0.0 if again else STOP_GRACE_SECONDS))
            )
            if self._budget is not None:
                self._budget.open()
            if self._outer is not None:
                self._outer.on_cancel(self._cancel)
            self._interrupts = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        try:
            self.stop()
        finally:
            if self._outer is not None:
                self._outer.forget(self._cancel)
            try:
                under_way = None if isinstance(error, Stopped) else error
                is_kept = self._keeps_losers if self._winner else self._keeps_failed
                if is_kept and not (under_way or self.is_cancelled):
                    self._branches.keep_all()
                self._branches.clear(under_way)
            finally:
                if self._budget is not None:
                    self._budget.close()
                self._interrupts.close()
        if error is None and self._events.error is not None:
            raise self._events.error
        return isinstance(error, Stopped)

    def _cancel(self, grace_seconds: float) -> None:
        # Called from any thread, a signal handler included.
        self._completions.post(lambda: self._on_cancelled(grace_seconds))

    def _on_cancelled(self, grace_seconds: float) -> None:
        self._completions.is_cancelled = True
        self._workers.cancel(grace_seconds)

    def _give_up(self, timed_out_after: float | None) -> None:
        """Sets the final state of all attempts that have not finished."""
        unfinished = [*self._workers.running, *(attempt for attempt, _, _ in self._waiting)]
        self._waiting.clear()
        for attempt in unfinished:
            if timed_out_after is not None:
                attempt.end("timed_out", out_of_time(timed_out_after))
            else:
                attempt.end("cancelled", CandidateResult(success=False, exit_code=1))
            self._events.finished(attempt)
