"""The threads that work for one call: some try candidates, some ask the user's callbacks.

What they find out goes into the mailbox of the thread that owns the call, and only that thread
uses Workers. A plain function cannot be killed: its thread is left behind, and works on in a branch
that is gone (ESTALE).
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
    """What a callback will have said."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.take: Callable[[], object] | None = None
        """Returns or raises what the callback did; None until then."""


class Workers:
    """One call's. `on_finished` is told each candidate that has ended, in the owner's thread."""

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
        """The attempts under way."""
        return list(self._running)

    def start(self, attempt: Attempt, task: Task, work: Callable[[], CandidateResult]) -> None:
        """Tries a candidate."""
        self._spawn(attempt.branch.name, self._try, attempt, task, work)
        self._running[attempt] = task

    def ask(
        self, task: Task, callback: Callable[..., object], args: tuple[object, ...]
    ) -> CallbackReply:
        """Calls one of the user's callbacks."""
        reply = CallbackReply(task)
        self._spawn(f"{task.attempt.branch.name} callback", self._ask, reply, callback, args)
        self._asking.add(task)
        return reply

    def cancel(self, grace_seconds: float) -> None:
        """Asks all for their end."""
        for task in [*self._running.values(), *self._asking]:
            task.cancel(grace_seconds)

    def settle(self, grace_seconds: float) -> None:
        """Stops what can be stopped and waits for it; an interrupt meanwhile ends the grace."""
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
        # What was told to end and did is settled; a function that cannot be told is forgotten.
        self._running.clear()

    def _spawn(self, name: str, target: Callable[..., None], *args: object) -> None:
        # A daemon thread: a function that never returns must not keep the program from ending.
        run = contextvars.copy_context().run
        thread = threading.Thread(target=run, args=(target, *args), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise ForkError(
                f"no thread could be started for {name}, beside {len(self._running)} that run; "
                "nothing was committed",
                hint="let fewer run at once: max_parallel, or --parallel",
            ) from error

    def _try(self, attempt: Attempt, task: Task, work: Callable[[], CandidateResult]) -> None:
        try:
            answer = task.run(work)
            state: State = "succeeded" if answer.success else "failed"
            if answer.exception is not None:
                state = "error"
        except BaseException as error:  # even SystemExit says no more than: this one failed
            answer = with_end(CandidateResult(success=False, exception=error, exit_code=1), task)
            state = "error"
        self._completions.post(lambda: self._finished(attempt, state, answer))

    def _finished(self, attempt: Attempt, state: State, answer: CandidateResult) -> None:
        if self._running.pop(attempt, None) is not None:  # else nobody waits for its answer now
            self._on_finished(attempt, state, answer)

    def _ask(
        self, reply: CallbackReply, callback: Callable[..., object], args: tuple[object, ...]
    ) -> None:
        try:
            take = _returner(reject_coroutines(reply.task.run(callback, *args)))
        except BaseException as error:  # raised again by the thread that asked
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
