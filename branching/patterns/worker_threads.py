"""The worker threads of one call: they run candidates and the user's callbacks.

They post their results to the completion queue of the thread that owns the call, and only that
thread uses Workers. A plain function cannot be killed: its thread is not waited for and continues
in a branch that no longer exists (ESTALE).
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable

from branching.errors import ForkError
from branching.patterns.attempt import Attempt, Task, with_end
from branching.patterns.completion_queue import CompletionQueue
from branching.patterns.results import CandidateResult, State, reject_coroutines


class CallbackReply:
    """Future for the result of a user's callback."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.take: Callable[[], object] | None = None
        """Returns or raises the result of the callback; None until the callback ends."""


class Workers:
    """The worker threads of one call.

    `on_finished` is called for each finished candidate, in the owner's thread.
    """

    def __init__(
        self,
        completions: CompletionQueue,
        on_finished: Callable[[Attempt, State, CandidateResult], None],
    ) -> None:
        self._completions = completions
        self._on_finished = on_finished
        self._running: dict[Attempt, Task] = {}
        self._asking: set[Task] = set()

    @property
    def running(self) -> list[Attempt]:
        """The running attempts."""
        return list(self._running)

    def start(self, attempt: Attempt, task: Task, work: Callable[[], CandidateResult]) -> None:
        """Starts a thread that runs a candidate."""
        self._spawn(attempt.branch.name, self._try, attempt, task, work)
        self._running[attempt] = task

    def ask(
        self, task: Task, callback: Callable[..., object], args: tuple[object, ...]
    ) -> CallbackReply:
        """Starts a thread that calls one of the user's callbacks."""
        reply = CallbackReply(task)
        self._spawn(f"{task.attempt.branch.name} callback", self._ask, reply, callback, args)
        self._asking.add(task)
        return reply

    def cancel(self, grace_seconds: float) -> None:
        """Cancels all tasks without waiting for them."""
        for task in [*self._running.values(), *self._asking]:
            task.cancel(grace_seconds)

    def settle(self, grace_seconds: float) -> None:
        """Cancels all tasks and waits for those that can be stopped.

        A KeyboardInterrupt during the wait ends the grace period and is raised afterwards.
        """
        interrupt: KeyboardInterrupt | None = None
        self.cancel(grace_seconds)
        while any(task.must_end for task in [*self._running.values(), *self._asking]):
            try:
                self._completions.act()
            except KeyboardInterrupt as again:
                interrupt = again
                self.cancel(0.0)
        if interrupt is not None:
            raise interrupt
        # What remains are plain functions, which cannot be stopped and are not waited for.
        self._running.clear()

    def _spawn(self, name: str, target: Callable[..., None], *args: object) -> None:
        # A daemon thread, because a function that never returns must not block the program's exit.
        run = contextvars.copy_context().run
        thread = threading.Thread(target=run, args=(target, *args), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise ForkError(
                f"no thread could be started for {name}, beside {len(self._running)} that run; "
                "nothing was committed",
                hint="run fewer concurrently: max_parallel, or --parallel",
            ) from error

    def _try(self, attempt: Attempt, task: Task, work: Callable[[], CandidateResult]) -> None:
        try:
            answer = task.run(work)
            state: State = "succeeded" if answer.success else "failed"
            if answer.exception is not None:
                state = "error"
        except BaseException as error:  # SystemExit, too, means only that this candidate failed
            answer = with_end(CandidateResult(success=False, exception=error, exit_code=1), task)
            state = "error"
        self._completions.post(lambda: self._finished(attempt, state, answer))

    def _finished(self, attempt: Attempt, state: State, answer: CandidateResult) -> None:
        if self._running.pop(attempt, None) is not None:  # otherwise the result is not needed
            self._on_finished(attempt, state, answer)

    def _ask(
        self, reply: CallbackReply, callback: Callable[..., object], args: tuple[object, ...]
    ) -> None:
        try:
            take = _returner(reject_coroutines(reply.task.run(callback, *args)))
        except BaseException as error:  # the owner's thread raises it again
            take = _raiser(error)
        self._completions.post(lambda: self._answered(reply, take))

    def _answered(self, reply: CallbackReply, take: Callable[[], object]) -> None:
        self._asking.discard(reply.task)
        reply.take = take


def _returner(value: object) -> Callable[[], object]:
    return lambda: value


def _raiser(error: BaseException) -> Callable[[], object]:
    def reraise() -> object:
        raise error

    return reraise
